"""Measure inferred predictions on 30 edit prompts: python bench/edit_prompts.py

Each prompt has a part of a file of this repository in the format of an editor, and asks for a change; ten other prompts
quote the same code and ask no rewrite. The answers are scripted, as in bench/draft_corpus.py: a logits processor forces
the edited text, because a small model cannot edit code. So the edits are ideal, the target's forward passes and the
drafters are real, and a model that rephrases gains less.

Each prompt runs as the server sends it without and with `--no-infer-prediction`, by turns.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from draft_corpus import FOLDER, LINES, STEMS, edited, forced, per_step, total_seconds

from foretell import LLM, SpeculationChoice
from foretell.draft.suffix import OutputStore
from foretell.server.inferred_prediction import infer_prediction

# The prompt and the answer of each format, with the code before and after the change.
FORMATS = {
    "Zed": (
        "### Instruction:\nComplete the edit.\n### User Excerpt:\n```{path}\n<|editable_region_start|>\n{old}\n"
        "<|editable_region_end|>\n```\n### Response:\n",
        "<|editable_region_start|>\n{new}\n<|editable_region_end|>",
    ),
    "Sweep": (
        "<|file_sep|>original/{path}\n{old}\n<|file_sep|>current/{path}\n{old}\n<|file_sep|>updated/{path}\n",
        "{new}\n",
    ),
    "code tags": ("<code>\n{old}\n</code>\nRename `{name}` and check its value.", "<code>\n{new}\n</code>"),
    "rewrite tags": (
        "<document>\n<rewrite_this>\n{old}\n</rewrite_this>\n</document>\nRename `{name}` and check its value.",
        "{new}\n",
    ),
    "whole file": (
        "```python\n{old}\n```\nRename `{name}` and check its value. Answer with the whole file.",
        "```python\n{new}\n```",
    ),
    "no rewrite": (
        "```python\n{old}\n```\nWhat does `{name}` mean here?",
        "`{name}` is a value that the code above computes and then passes on; nothing else depends on it.",
    ),
}
OTHER = "no rewrite"


def prompts(folder: Path, count: int, seed: int) -> list[tuple[str, str, str]]:
    """Return the format, prompt and answer of `count` edits, and of a third as many other questions."""
    rng = random.Random(seed)
    texts = {path.name: path.read_text() for path in sorted(folder.rglob("*.py"))}
    usable = sorted(name for name, text in texts.items() if text.count("\n") > 3 * LINES)
    edits = [name for name in FORMATS if name != OTHER]
    kinds = [edits[i % len(edits)] for i in range(count)] + [OTHER] * (count // 3)
    found: list[tuple[str, str, str]] = []
    while len(found) < len(kinds):
        path = rng.choice(usable)
        lines = texts[path].split("\n")
        begin = rng.randrange(len(lines) - LINES)
        old = lines[begin : begin + LINES]
        names = sorted({name for line in old for name in re.findall(r"\b[a-z_]{5,}\b", line)})
        if not names or len("\n".join(old)) < 20 * LINES or any("```" in line or "<" in line for line in old):
            continue
        name = rng.choice(names)
        new = edited(old, name, f"{rng.choice(STEMS)}_{name}", rng)
        kind = kinds[len(found)]
        parts = {"path": path, "name": name, "old": "\n".join(old), "new": "\n".join(new)}
        prompt, answer = (text.format(**parts) for text in FORMATS[kind])
        assert (infer_prediction(prompt) is None) == (kind == OTHER), prompt
        found.append((kind, prompt, answer))
    return found


def run(llm: LLM, prompt: str, answer: str, choice: SpeculationChoice) -> dict[str, Any]:
    """Return tokens, steps and decode seconds of one answer."""
    suffix: Any = llm.engine.drafter.drafters["suffix"]
    suffix.store = OutputStore(65_536, 16)  # nothing of the other variants' output
    tokens = llm.tokenizer.encode(answer, add_special=False)
    chat = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    (output,) = llm.generate(chat, forced(tokens), speculation=choice)
    assert list(output.outputs[0].token_ids) == tokens, "the scripted answer"
    counts = output.speculation
    seconds = output.timings.total - output.timings.first_token
    return {"tokens": counts.tokens, "steps": counts.steps, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="repository with Python files")
    parser.add_argument("--edits", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-speculative-tokens", type=int, default=0, help="fixed draft length; 0: adaptive")
    args = parser.parse_args()
    llm = LLM(
        args.model, drafter="suffix,prediction", quantization=args.quantization, quiet=True,
        num_speculative_tokens=args.num_speculative_tokens or None,
    )  # fmt: skip
    runs: dict[tuple[str, str], list[list[dict[str, Any]]]] = defaultdict(list)
    for _ in range(args.rounds):
        results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for kind, prompt, answer in prompts(args.folder, args.edits, args.seed):
            found = infer_prediction(prompt)
            choices = {
                "plain": SpeculationChoice(enabled=False),
                "off": SpeculationChoice(),
                "inferred": SpeculationChoice(prediction=found, prediction_is_inferred=found is not None),
            }
            for variant, choice in choices.items():
                results[kind, variant].append(run(llm, prompt, answer, choice))
        for key, turns in results.items():
            runs[key].append(turns)
    report(runs)


def report(runs: dict[tuple[str, str], list[list[dict[str, Any]]]]) -> None:
    """Print tokens per step without and with inferred predictions, and the ratio of their speeds, by format."""
    rows: list[dict[str, Any]] = []
    kinds = [*FORMATS, "all edits"]
    for kind in kinds:
        chosen = [name for name in FORMATS if name != OTHER] if kind == "all edits" else [kind]
        chosen = [name for name in chosen if (name, "off") in runs]
        by_variant = {
            variant: [sum(parts, []) for parts in zip(*(runs[name, variant] for name in chosen), strict=True)]
            for variant in ("plain", "off", "inferred")
        }
        row: dict[str, Any] = {"format": kind}
        for variant in ("off", "inferred"):
            row[variant] = per_step(sum(by_variant[variant], []))
            pairs = zip(by_variant["plain"], by_variant[variant], strict=True)
            row[f"{variant}_speedup"] = round(
                median(total_seconds(base) / total_seconds(run) for base, run in pairs), 2
            )
        rows.append(row)
        print(
            f"{kind}: {row['off']:.2f} tokens a step without, {row['inferred']:.2f} with inferred predictions; "
            f"{row['off_speedup']:.2f}x and {row['inferred_speedup']:.2f}x plain",
            flush=True,
        )
    print(json.dumps({"results": rows}))


if __name__ == "__main__":
    main()
