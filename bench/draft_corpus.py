"""Measure drafts from a repository on an agent's trace: python bench/draft_corpus.py

Ten turns of one conversation. In each the answer quotes about twenty lines of a file with edits, by turns as a code
block and as a tool call with the old and the new lines in JSON. The answers are scripted: a logits processor forces
them token by token, because a small model cannot do agent work. So the answers are ideal, the target's forward passes
and the drafters are real, and a model that rephrases what it quotes gains less. The processor costs time for each row,
so speeds are those of the script, not of serving.

Each turn runs without the lines in the prompt, with them as the result of a tool call, and with numbered lines, as
tools for reading files return them: without a drafter, with `suffix`, with `suffix` and the results as a call quotes
them (what the server does), and with `suffix` and `corpus` over a copy of the folder. Edits are written to the copy
before the next turn. `--free` answers with paragraphs of the docs instead, which quote nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.draft.suffix import OutputStore
from foretell.server.openai.chat_requests import ChatMessageParam
from foretell.server.quoted_results import quoted_results

FOLDER = Path(__file__).parents[1] / "foretell"
LINES = 18  # of a file in one answer
SYSTEM = "You are a coding agent. Answer with the changed code, or call the tool `edit` with path, old and new text."
DOCS = Path(__file__).parents[1] / "docs" / "explanation"
# Drafters, and whether the results are a reference.
VARIANTS: dict[str, tuple[str | None, bool]] = {
    "plain": (None, False),
    "suffix": ("suffix", False),
    "suffix and results": ("suffix", True),
    "suffix and corpus": ("suffix,corpus", False),
}
PROMPTS = ("without the lines", "with the lines", "with numbered lines")
STEMS = ("amount", "entries", "outcome", "sources")  # new names of identifiers


@dataclass(frozen=True)
class Turn:
    """One turn: a file before and after the edit, what the agent is asked and what it answers."""

    path: str
    edited: str  # the whole file
    asked: str
    read: str  # the lines before the edit
    answer: str
    kind: str


def scripted_turns(folder: Path, count: int, seed: int, is_free: bool) -> list[Turn]:
    """Return the turns over the files of a folder, which every third turn visits again."""
    rng = random.Random(seed)
    pages = [page.read_text() for page in sorted(DOCS.glob("*.md"))]
    paragraphs = [text for page in pages for text in page.split("\n\n") if 300 < len(text) < 1500 and "|" not in text]
    contents = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    usable = [path for path, text in contents.items() if text.count("\n") > 3 * LINES]
    turns: list[Turn] = []
    while len(turns) < count:
        path = rng.choice([turn.path for turn in turns]) if len(turns) % 3 == 2 else rng.choice(usable)
        lines = contents[path].split("\n")
        begin = rng.randrange(len(lines) - LINES)
        old = lines[begin : begin + LINES]
        names = sorted({name for line in old for name in re.findall(r"\b[a-z_]{5,}\b", line)})
        if not names or len("\n".join(old)) < 20 * LINES:
            continue
        name = rng.choice(names)
        new = edited(old, name, f"{rng.choice(STEMS)}_{name}", rng)
        contents[path] = "\n".join([*lines[:begin], *new, *lines[begin + LINES :]])
        old_text, new_text = "\n".join(old), "\n".join(new)
        if len(turns) % 2:
            call = {"name": "edit", "arguments": {"path": path, "old": old_text, "new": new_text}}
            answer, kind = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>", "tool call"
        else:
            answer, kind = f"Here is the changed part of `{path}`:\n```python\n{new_text}\n```\n", "code block"
        if is_free:
            answer, kind = rng.choice(paragraphs), "free text"
        asked = f"In {path}, rename `{name}` near line {begin + 1}, and check its value."
        turns.append(Turn(path, contents[path], asked, old_text, answer, kind))
    return turns


def edited(lines: list[str], name: str, new_name: str, rng: random.Random) -> list[str]:
    """Return lines with an identifier renamed, one line added and one removed."""
    added, removed = rng.sample(range(len(lines)), 2)
    found: list[str] = []
    for number, line in enumerate(lines):
        if number != removed:
            found.append(re.sub(rf"\b{name}\b", new_name, line))
        if number == added:
            indent = re.match(r" *", line)
            found.append(f"{indent[0] if indent else ''}assert {new_name} is not None")
    return found


def forced(tokens: list[int]) -> SamplingParams:
    """Return parameters that force these tokens."""

    def force(output: list[int], scores: Any) -> Any:
        scores.fill_(-float("inf"))
        scores[tokens[len(output)]] = 0.0
        return scores

    return SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True, logits_processors=(force,))


def run_trace(
    llm: LLM, turns: list[Turn], copy: Path, drafter: str | None, has_reference: bool, prompt: str
) -> list[dict[str, Any]]:
    """Return tokens, steps, draft tokens and decode seconds of each turn."""
    suffix: Any = llm.engine.drafter.drafters["suffix"]
    suffix.store = OutputStore(65_536, 16)  # nothing of earlier runs of the same trace
    choice = SpeculationChoice(enabled=drafter is not None, drafter=drafter)
    messages = [{"role": "system", "content": SYSTEM}]
    results: list[dict[str, Any]] = []
    before = {turn.path: (copy / turn.path).read_text() for turn in turns}
    corpus = llm.assembly.corpus
    assert corpus is not None, "the engine has a folder"
    for turn in turns:
        corpus.refresh()
        messages.append({"role": "user", "content": turn.asked})
        if prompt != PROMPTS[0]:
            messages.append({"role": "assistant", "content": f'<tool_call>{{"path": "{turn.path}"}}</tool_call>'})
            lines = enumerate(turn.read.split("\n"), 1)
            numbered = "\n".join(f"{number:6}\u2192{line}" for number, line in lines)
            messages.append({"role": "tool", "content": turn.read if prompt == PROMPTS[1] else numbered})
        if has_reference:
            sent = [ChatMessageParam(role=each["role"], content=each["content"]) for each in messages]  # type: ignore[arg-type]
            choice = replace(choice, reference=quoted_results(sent, "hermes"))
        tokens = llm.tokenizer.encode(turn.answer, add_special=False)
        (output,) = llm.generate(llm.tokenizer.encode_chat(messages), forced(tokens), speculation=choice)
        assert list(output.outputs[0].token_ids) == tokens, "the scripted answer"
        counts = output.speculation
        seconds = output.timings.total - output.timings.first_token
        found = {"tokens": counts.tokens, "steps": counts.steps, "drafted": counts.drafted, "seconds": seconds}
        results.append({"kind": turn.kind, **found})
        messages.append({"role": "assistant", "content": turn.answer})
        (copy / turn.path).write_text(turn.edited)
    for path, text in before.items():
        (copy / path).write_text(text)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="repository with Python files")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=8, help="fixed draft length, as for the table; 0: adaptive"
    )
    parser.add_argument("--free", action="store_true", help="answer with text that quotes nothing")
    parser.add_argument("--only-steps", action="store_true", help="leave out plain decoding, and so the speeds")
    args = parser.parse_args()
    variants = {name: each for name, each in VARIANTS.items() if each[0] is not None or not args.only_steps}
    turns = scripted_turns(args.folder, args.turns, args.seed, args.free)
    found: dict[tuple[str, str], list[list[dict[str, Any]]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "files"
        shutil.copytree(args.folder, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
        llm = LLM(
            args.model, drafter="suffix", draft_corpus=copy, quantization=args.quantization,
            num_speculative_tokens=args.num_speculative_tokens or None,
        )  # fmt: skip
        for _ in range(args.rounds):
            for prompt in PROMPTS:
                for name, (drafter, has_reference) in variants.items():
                    if not has_reference or prompt != PROMPTS[0]:
                        found[prompt, name].append(run_trace(llm, turns, copy, drafter, has_reference, prompt))
    report(found)


def report(found: dict[tuple[str, str], list[list[dict[str, Any]]]]) -> None:
    """Print a table and one JSON line: tokens per step, also by kind of answer, and speedups over plain decoding."""
    rows = []
    for (prompt, name), runs in found.items():
        every = [turn for run in runs for turn in run]
        row: dict[str, Any] = {"prompt": prompt, "drafters": name, "tokens_per_step": per_step(every)}
        kinds = sorted({turn["kind"] for turn in every})
        for kind in kinds:
            row[kind] = per_step([turn for turn in every if turn["kind"] == kind])
        row["drafted_per_token"] = round(sum(turn["drafted"] for turn in every) / sum(t["tokens"] for t in every), 3)
        by_kind = ", ".join(f"{row[kind]:.2f} in {kind}s" for kind in kinds)
        words = f"{prompt}, {name}: {row['tokens_per_step']:.2f} tokens a step ({by_kind}), "
        words += f"{row['drafted_per_token']:.2f} draft tokens a token"
        if (prompt, "plain") in found:
            pairs = zip(found[prompt, "plain"], runs, strict=True)
            ratios = [total_seconds(base) / total_seconds(run) for base, run in pairs]
            row["speedup"], row["rounds"] = round(median(ratios), 2), [round(ratio, 3) for ratio in ratios]
            words += f", {row['speedup']:.2f}x plain"
        rows.append(row)
        print(words, flush=True)
    print(json.dumps({"turns": len(next(iter(found.values()))[0]), "results": rows}))


def per_step(turns: list[dict[str, Any]]) -> float:
    return round(sum(turn["tokens"] for turn in turns) / max(1, sum(turn["steps"] for turn in turns)), 3)


def total_seconds(turns: list[dict[str, Any]]) -> float:
    return sum(float(turn["seconds"]) for turn in turns)


if __name__ == "__main__":
    main()
