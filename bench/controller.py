"""How close the controller comes to the best fixed length in hindsight: python bench/controller.py

Runs it in a world of numbers and prints its share of the best fixed drafter and length, and of plain decoding, as
Markdown. `--plots FOLDER` draws the same, and the lengths it chose while things changed. With `--cells FILE` it draws
instead what `foretell bench never-slower --out FILE` measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from foretell.types import Sequence  # noqa: E402
from tests.control.scenarios import DRIFTING, STATIONARY, adaptive, free, run_adaptive, steady  # noqa: E402
from tests.control.simulation import AcceptanceFn, Machine, Scenario, Simulator, best_fixed  # noqa: E402

WIDTH, BAR, LEFT = 720, 18, 230
STYLE = "font-family:sans-serif;font-size:12px"
GOOD, BAD, INK = "#2b7a78", "#c0504d", "#333"


def ratios(scenario: Scenario, seeds: int) -> tuple[float, float]:
    """Seconds of the best fixed and of plain over the controller's, means over seeds."""
    pairs = []
    for seed in range(seeds):
        each = replace(scenario, seed=seed)
        best, plain = best_fixed(each)
        taken = run_adaptive(each).seconds
        pairs.append((best / taken, plain / taken))
    return fmean(best for best, _ in pairs), fmean(plain for _, plain in pairs)


def svg(height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" style="{STYLE}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{INK}">{words}</text>'


def regret_plot(found: dict[str, tuple[float, float]]) -> str:
    """A bar for each scenario: how much longer than the best fixed length it takes; to the left: less long."""
    zero, scale = LEFT + 170, 1000  # pixels for the whole of the best's time
    parts = [
        text(10, 20, "time beyond the best fixed drafter and length in hindsight; left of the line: less than that")
    ]
    for i, (name, (best, _)) in enumerate(found.items()):
        regret, y = 1 / best - 1, 34 + i * (BAR + 4)
        long = max(1.0, abs(regret) * scale)
        parts.append(text(LEFT - 10, y + 13, name, "end"))
        x = zero if regret > 0 else zero - long
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="{BAR}" fill="{BAD if regret > 0 else GOOD}"/>'
        )
        parts.append(text(zero + long + 6 if regret > 0 else zero + 6, y + 13, f"{regret:+.1%}"))
    bottom = 34 + len(found) * (BAR + 4)
    parts.append(f'<line x1="{zero}" y1="28" x2="{zero}" y2="{bottom}" stroke="{INK}"/>')
    return svg(bottom + 10, parts)


def line(values: list[float], top: float, height: float, most: float, colour: str) -> str:
    width = WIDTH - 80
    points = " ".join(
        f"{60 + width * i / max(1, len(values) - 1):.1f},{top + height * (1 - value / most):.1f}"
        for i, value in enumerate(values)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def smooth(values: list[float], over: int) -> list[float]:
    """Means of so many neighbours."""
    return [fmean(values[i : i + over]) for i in range(0, len(values) - over + 1, over)]


@dataclass(frozen=True)
class Trace:
    """A scenario to be watched, and what changes in it."""

    title: str
    name: str
    scenario: Scenario
    change: Callable[[list[Sequence]], float]

    def run(self) -> tuple[list[float], list[float]]:
        """For each step what has changed by then, and the nodes chosen for a text."""
        world = Simulator(self.scenario, adaptive(self.scenario))
        changes = [self.change(running) for running in world.steps()]
        return changes, world.result.lengths


def watched(title: str, chance: AcceptanceFn, **settings: int) -> Trace:
    scenario = free(chance, Machine(row=0.004), **settings)
    return Trace(title, "acceptance", scenario, lambda seqs: chance(seqs[0].id, len(seqs[0].tokens)))


def trace_plot(traces: list[Trace]) -> str:
    """For each scenario what changes, and below it the length that was chosen."""
    parts, top = [], 10.0
    for trace in traces:
        changes, lengths = trace.run()
        over = max(1, len(lengths) // 300)
        changes, lengths = smooth(changes, over), smooth(lengths, over)
        parts.append(text(10, top + 12, trace.title))
        for name, values, colour in ((trace.name, changes, BAD), ("nodes a text", lengths, GOOD)):
            most = max(1.0, *values)
            parts += [text(55, top + 34, f"{most:.0f}", "end"), text(55, top + 84, "0", "end")]
            parts += [text(WIDTH - 20, top + 30, name, "end"), line(values, top + 26, 54, most, colour)]
            parts.append(f'<line x1="60" y1="{top + 80:.0f}" x2="{WIDTH - 20}" y2="{top + 80:.0f}" stroke="#bbb"/>')
            top += 70
        top += 40
    return svg(int(top), parts)


TRACES = [
    watched(
        "acceptance rate changes between sequences",
        lambda request, place: 0.9 if (request // 4) % 2 else 0.1,
        requests=24,
    ),
    watched(
        "acceptance rate changes within a sequence",
        lambda request, place: 0.9 if (place // 200) % 2 else 0.1,
        requests=1,
        tokens=1200,
    ),
    Trace(
        "bursts of 32 sequences; acceptance rate 0.6",
        "batch size",
        free(steady(0.6), Machine(row=0.003), requests=120, load=lambda begun: 32 if begun % 40 < 32 else 2),
        len,
    ),
]


def cells_plot(cells: list[dict[str, Any]]) -> str:
    """For each cell its ratio to plain with its interval, on a scale of doublings, and its bar."""
    each, bottom = 16, 50 + 16 * len(cells)

    def x(ratio: float) -> float:
        return LEFT + 90 + 180 * math.log2(max(ratio, 0.75))

    parts = [text(10, 20, "speed over plain decoding's with its 95% interval; the thin mark is the bar it must reach")]
    for ratio in (1.0, 1.5, 2.0, 3.0, 4.0):
        parts.append(f'<line x1="{x(ratio):.1f}" y1="38" x2="{x(ratio):.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(text(x(ratio), 36, f"{ratio:g}", "middle"))
    for i, cell in enumerate(cells):
        y, (low, high) = 52 + each * i, cell["speedup_interval"]
        colour = BAD if cell["verdict"] == "slower" else GOOD
        named = f"{cell['task']}, T={cell['temperature']:g}, batch {cell['batch']}, {cell['drafter']}"
        parts.append(text(LEFT - 10, y + 4, named, "end"))
        parts.append(
            f'<line x1="{x(low):.1f}" y1="{y}" x2="{x(high):.1f}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
        )
        parts.append(f'<circle cx="{x(cell["speedup"]):.1f}" cy="{y}" r="4" fill="{colour}"/>')
        bar = x(cell["bar"])
        parts.append(f'<line x1="{bar:.1f}" y1="{y - 6}" x2="{bar:.1f}" y2="{y + 6}" stroke="{INK}"/>')
    return svg(bottom + 10, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, help="JSON of never-slower, from which controller-cells.svg is plotted")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plots", type=Path, help="a folder for controller-regret.svg and controller-trace.svg")
    args = parser.parse_args()
    if args.cells is not None:
        plot = cells_plot(json.loads(args.cells.read_text())["cells"])
        ((args.plots or Path()) / "controller-cells.svg").write_text(plot)
        return
    found = {}
    print("| scenario | of the best fixed | of plain |\n|---|---:|---:|")
    for name, scenario in {**STATIONARY, **DRIFTING}.items():
        best, plain = found[name] = ratios(scenario, args.seeds)
        print(f"| {name} | {best:.2f} | {plain:.2f} |", flush=True)
    if args.plots is not None:
        (args.plots / "controller-regret.svg").write_text(regret_plot(found))
        (args.plots / "controller-trace.svg").write_text(trace_plot(TRACES))
    print(json.dumps({name: {"best": best, "plain": plain} for name, (best, plain) in found.items()}))


if __name__ == "__main__":
    main()
