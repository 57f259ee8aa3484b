"""foretell demo: three prompts with and without speculation, compared in one run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.utils.report_table import ReportTable

from .common import Command, add_report_arguments, check_output_path, load_llm, output_result
from .stream_output import StreamRenderer, StreamStats, palette_of, stream_renderer, wants_colour
from .tables import print_blocks

if TYPE_CHECKING:
    from rich.console import Console

    from foretell.llm import LLM
    from foretell.sampling_params import SamplingParams

QUESTION = "What is photosynthesis?"
CODE = "Write a Python class Stack with push, pop, peek and is_empty."
LETTER = """Dear Anna,

The meeting of the garden club takes place on Tuesday at seven in the town library. Please bring the list of plants \
that we ordered last month, the receipts of the hardware store, and the keys of the tool shed. Martin will show his \
photographs of the botanical garden, and Elena will report on the new watering system. The garden club thanks all \
members who helped to repair the greenhouse after the storm.

Best wishes,
Paul"""
EDIT = f'Replace the word "Tuesday" with "Thursday" in this letter:\n\n{LETTER}'
EDITED = LETTER.replace("Tuesday", "Thursday")
PROMPTS = {"chat": QUESTION, "code": CODE, "edit": EDIT}
MAX_TOKENS = 256
WHY = (
    "Chat gains less: its words are new, so fewer draft tokens are accepted. "
    "An edit copies its prompt and code repeats itself, so long drafts are accepted."
)


@dataclass(frozen=True)
class Comparison:
    """Statistics of one prompt with and without speculation."""

    name: str
    speculative: StreamStats
    plain: StreamStats

    @property
    def ratio(self) -> float:
        plain = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / plain if plain else 0.0

    @property
    def same_text(self) -> bool:
        return self.speculative.tokens == self.plain.tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt": self.name,
            "tokens": len(self.speculative.tokens),
            "steps": self.speculative.steps,
            "accepted_per_step": self.speculative.accepted_per_step,
            "tokens_per_second": self.speculative.tokens_per_second,
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speedup": self.ratio,
            "same_text": self.same_text,
        }


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    llm = load_llm(args)
    comparisons = [compare(llm, name, quiet=True) for name in PROMPTS] if args.json else show(llm)
    output_result({"model": llm.config.model, "prompts": [each.as_json() for each in comparisons]}, args)
    return 0 if all(each.same_text for each in comparisons) else 1


def show(llm: LLM) -> list[Comparison]:
    """Print the outputs of all prompts, styled by drafter, then the comparison as a table."""
    from rich.console import Console

    console = Console(color_system="auto" if wants_colour() else None, highlight=False, markup=False)
    console.print(f"{llm.config.model}, greedy, drafters: {', '.join(llm.engine.drafter.default_drafters) or 'none'}")
    if wants_colour() and (legend := palette_of(llm).legend(possible_origins(llm))):
        print(legend)
    comparisons = []
    for name, text in PROMPTS.items():
        print_heading(console, name, text)
        comparisons.append(compare(llm, name, quiet=False))
    console.print()
    print_blocks(console, [table(comparisons), *([WHY] if comparisons[0].ratio < comparisons[-1].ratio else [])])
    return comparisons


def possible_origins(llm: LLM) -> list[str]:
    """Return the drafters whose tokens the demo can show: the default ones, merged ones by their parts."""
    mix = llm.engine.drafter
    parts = {name: drafter.parts for name, drafter in mix.merged.items()}
    return list(dict.fromkeys(part for name in mix.default_drafters for part in parts.get(name, (name,))))


def print_heading(console: Console, name: str, text: str) -> None:
    """Print a prompt in one line as wide as the terminal."""
    line = " ".join(f"{name}: {text}".split())
    console.print("\n" + line, style="bold", no_wrap=True, overflow="ellipsis")


def compare(llm: LLM, name: str, *, quiet: bool) -> Comparison:
    """Stream the output with speculation, then generate it without."""
    from foretell.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=MAX_TOKENS)
    prompt = _encode(llm, PROMPTS[name])
    renderer = None if quiet else stream_renderer(llm, prompt, True)
    # Warm-up: after it the prefix cache has the prompt for both sides.
    _generate(llm, prompt, SamplingParams(max_tokens=4), speculate=True)
    speculative = _generate(llm, prompt, params, speculate=True, renderer=renderer)
    if not quiet:
        print("\n\n(again without speculation, to compare)")
    return Comparison(name, speculative, _generate(llm, prompt, params, speculate=False))


def _encode(llm: LLM, text: str) -> list[int]:
    if not llm.tokenizer.chat_template:
        return llm.tokenizer.encode(text)
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def _generate(
    llm: LLM, prompt: list[int], params: SamplingParams, *, speculate: bool, renderer: StreamRenderer | None = None
) -> StreamStats:
    from foretell.types import SpeculationChoice

    stats = StreamStats()
    for delta in llm.stream(prompt, params, speculation=SpeculationChoice(enabled=speculate)):
        stats.add(delta)
        if renderer is not None:
            print(renderer.render(delta), end="", flush=True)
    return stats


def table(comparisons: list[Comparison]) -> ReportTable:
    """Return the comparison as a table."""
    return ReportTable(
        ["prompt", "same text", "tokens", "tokens/step", "plain", "speculative", "ratio"],
        [
            [
                each.name,
                "yes" if each.same_text else "NO",
                str(len(each.speculative.tokens)),
                f"{each.speculative.accepted_per_step:.2f}",
                f"{each.plain.tokens_per_second:.0f}",
                f"{each.speculative.tokens_per_second:.0f}",
                f"{each.ratio:.2f}x",
            ]
            for each in comparisons
        ],
        title="Speed in tokens/s, plain and speculative",
        words=2,
    )


DEMO = Command("compare three prompts with and without speculation", add_report_arguments, run)
