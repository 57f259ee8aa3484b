"""Tables of stored runs, where pages show them:

    python bench/readme_table.py [bench/runs/NAME.json ...] [--check]

writes each run's table into README.md and the pages of docs/, between <!-- run bench/runs/NAME.json --> and
<!-- end of run -->. <!-- run bench/runs/NAME.json short --> is a table of fewer rows and columns, for the README.
Without names it writes all. --check writes nothing and fails where a page is not what its run gives.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = re.compile(
    r"(?P<head><!-- run (?P<run>\S+)(?P<short> short)? -->\n)(?P<table>.*?)(?P<foot><!-- end of run -->)", re.S
)
Run = Mapping[str, Any]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ratio(row: Run) -> str:
    if row["speedup"] is None:
        return "-"
    bounds = row["speedup_interval"]
    return f"{row['speedup']:.2f}" + ("" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})")


def figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def conditions(run: Run) -> str:
    """What a reader must know, in a line."""
    machine = run["machine"]
    where = f"{machine['device']}, {machine['cores']} cores" + (
        f", torch {machine['torch']}" if "torch" in machine else ""
    )
    what = f"{run['model']} ({run['weights']})" if "model" in run else run.get("models", "several engines")
    rounds = f"{run['rounds']} rounds, variants interleaved"
    most = "each prompt's own limit" if run["max_tokens"] is None else f"at most {run['max_tokens']} tokens"
    return f"Measured {run['date']}: {what}; {where}; {most}; {rounds}."


def offline_table(run: Run) -> list[str]:
    """A row for each task; a column for the temperature or the batch size where there are several."""
    rows = [*run["cells"], *run["overall"]]
    several = [name for name in ("arm", "temperature", "batch") if len({row[name] for row in rows}) > 1]
    words = {"arm": "drafter", "temperature": "T", "batch": "at once"}
    head = ["task", *(words[name] for name in several), "tokens/s plain", "with speculation", "speedup"]
    head += ["tokens per step", "same output"]
    lines = [line(head), line(["---"] * (1 + len(several)) + ["---:"] * 4 + ["---"])]
    for row in rows:
        name = f"mean of {row['tasks']}" if row["task"] == "all" else row["task"]
        speeds = [figure(row[each], 0) for each in ("plain_tokens_per_second", "tokens_per_second")]
        same = {True: "yes", False: "NO", None: "not promised"}[row["same_text"]]
        settings = ["as asked" if row[each] is None else str(row[each]) for each in several]
        lines.append(line([name, *settings, *speeds, ratio(row), figure(row["accepted_per_step"], 2), same]))
    return lines


def compare_table(run: Run) -> list[str]:
    """A row for each peer, a column for each task."""
    tasks = list(dict.fromkeys(cell["task"] for cell in run["cells"]))
    found = {(cell["task"], cell["arm"]): cell for cell in run["cells"]}
    last = [f"times {run['baseline']}", "TTFT, ms", "tokens per step", f"same output as {run['baseline']}"]
    head = ["tokens/s", *tasks, "mean", *last]
    lines = [line(head), line(["---"] + ["---:"] * (len(head) - 2) + ["---"])]
    for row in run["overall"]:
        speeds = [figure(found[task, row["arm"]]["tokens_per_second"], 0) for task in tasks]
        first = "-" if row["first_token"] is None else f"{1000 * row['first_token']['p50']:.0f}"
        same = f"{row['same_texts']} of {row['texts']}"
        cells = [*speeds, figure(row["tokens_per_second"], 0), ratio(row), first, figure(row["accepted_per_step"], 2)]
        lines.append(line([row["arm"], *cells, same]))
    return lines


def synthetic_table(run: Run) -> list[str]:
    """A row for each rate, length and batch size; sequences that advance on their own and in lockstep."""
    head = ["rate", "draft length", "batch", "tokens per step", "expected", "speedup", "lockstep: tokens per step"]
    lines = [line([*head, "lockstep: speedup"]), line(["---:"] * 8)]
    found = {(cell["rate"], cell["length"], cell["batch"], cell["mode"]): cell for cell in run["cells"]}
    for (rate, length, batch, mode), cell in found.items():
        if mode == "sequence":
            other = found[rate, length, batch, "batch"]
            figures = [figure(cell[name], 2) for name in ("accepted_per_step", "expected_per_step")]
            shared = [figure(other["accepted_per_step"], 2), ratio(other)]
            lines.append(line([f"{rate:g}", str(length), str(batch), *figures, ratio(cell), *shared]))
    return lines


def short_offline_table(run: Run) -> list[str]:
    """Rows for the task that gains least, the one that gains most, and the mean."""
    cells = sorted(run["cells"], key=lambda row: row["speedup"])
    named = [(f"{cells[0]['task']} (least)", cells[0]), (f"{cells[-1]['task']} (most)", cells[-1])]
    named += [(f"mean of {row['tasks']} tasks", row) for row in run["overall"]]
    lines = [line(["task", "tokens/s plain", "with speculation", "speedup (95% interval)"])]
    lines.append(line(["---"] + ["---:"] * 3))
    for name, row in named:
        speeds = [figure(row[each], 0) for each in ("plain_tokens_per_second", "tokens_per_second")]
        lines.append(line([name, *speeds, ratio(row)]))
    return lines


def short_compare_table(run: Run) -> list[str]:
    """A row for each peer with its mean over the tasks."""
    lines = [line(["engine", "tokens/s", f"times {run['baseline']}", "TTFT, ms", "tokens per step"])]
    lines.append(line(["---"] + ["---:"] * 4))
    for row in run["overall"]:
        first = "-" if row["first_token"] is None else f"{1000 * row['first_token']['p50']:.0f}"
        figures = [figure(row["tokens_per_second"], 0), figure(row["speedup"], 2), first]
        lines.append(line([row["arm"], *figures, figure(row["accepted_per_step"], 2)]))
    return lines


def peers_table(run: Run, short: bool = False) -> list[str]:
    """A row for each setting of each engine with its ratio to llama.cpp's Q8_0, and a column for each kind of prompt.

    The short one has no columns for prompts, no weights in float32, and of llama.cpp's drafts the fastest of each kind.
    """
    speeds = run["tokens_per_second"]
    mean = {name: row["geometric_mean"] for name, row in speeds.items()}
    names = sorted(mean, key=lambda name: (name.startswith("foretell"), name))
    if short:
        for kind in ("n-gram", "draft model"):
            drafting = sorted(
                (name for name in names if name.startswith("llama.cpp") and name.endswith(f" {kind}")),
                key=mean.__getitem__,
            )
            names = [name for name in names if name not in drafting[:-1]]
        names = [name for name in names if "32" not in name]
    kinds = [] if short else [kind for kind in speeds[names[0]] if kind != "geometric_mean"]
    head = ["tokens/s", *kinds, "geometric mean", "times llama.cpp Q8_0", "prompt of 512"]
    lines = [line(head), line(["---"] + ["---:"] * (len(head) - 1))]
    for name in names:
        figures = [figure(speeds[name][kind], 0) for kind in [*kinds, "geometric_mean"]]
        ratio_to_base = figure(mean[name] / mean["llama.cpp Q8_0"], 2)
        lines.append(line([name, *figures, ratio_to_base, figure(run["reading"].get(name), 0)]))
    return lines


def short_peers_table(run: Run) -> list[str]:
    return peers_table(run, short=True)


TABLES: dict[str, Callable[[Run], list[str]]] = {
    "offline": offline_table,
    "drafters": offline_table,
    "compare": compare_table,
    "synthetic": synthetic_table,
    "peers": peers_table,
}
SHORT: dict[str, Callable[[Run], list[str]]] = {
    "offline": short_offline_table,
    "compare": short_compare_table,
    "peers": short_peers_table,
}


def table(name: str, short: bool = False) -> str:
    """The table of a stored run, and what a reader must know of it."""
    path = ROOT / name
    if not path.exists():
        raise SystemExit(f"there is no {name}; write it with foretell bench ... --out {name}")
    run = json.loads(path.read_text(encoding="utf-8"))
    if run.get("bench") not in TABLES:
        raise SystemExit(f"{name} is no run of bench {', '.join(TABLES)}")
    tables = SHORT if short else TABLES
    return "\n".join([*tables[run["bench"]](run), "", conditions(run), ""])


def rewritten(text: str, names: Sequence[str]) -> str:
    """Return a page with its tables regenerated from all runs, or from the named ones."""

    def replace(found: re.Match[str]) -> str:
        if names and found["run"] not in names:
            return found[0]
        return f"{found['head']}{table(found['run'], bool(found['short']))}{found['foot']}"

    return PLACE.sub(replace, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    shown = {found["run"] for page in pages() for found in PLACE.finditer(page.read_text(encoding="utf-8"))}
    for name in args.runs:
        if name not in shown:
            raise SystemExit(f"no page shows {name}; put <!-- run {name} --> and <!-- end of run --> into one")
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, args.runs)
        if new == text:
            continue
        stale += 1
        print(f"{page.relative_to(ROOT)}: {'is not what its runs give' if args.check else 'written'}")
        if not args.check:
            page.write_text(new, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
