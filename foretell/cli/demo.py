"""foretell demo: two prompts with and without speculation, compared in one run."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .common import Command, add_report_arguments, check_output_path, load_llm, output_result
from .stream_output import Palette, StreamRenderer, StreamStats, stream_renderer, wants_colour

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.sampling_params import SamplingParams

QUESTION = "Why is the sky blue during the day and red in the evening?"
LETTER = """Dear Anna,

The meeting of the garden club takes place on Tuesday at seven in the town library. Please bring the list of plants \
that we ordered last month, the receipts of the hardware store, and the keys of the tool shed. Martin will show his \
photographs of the botanical garden, and Elena will report on the new watering system. The garden club thanks all \
members who helped to repair the greenhouse after the storm.

Best wishes,
Paul"""
EDIT = f"Rewrite this letter word for word, only change the day from Tuesday to Thursday.\n\n{LETTER}"
PROMPTS = {"chat": QUESTION, "edit": EDIT}
MAX_TOKENS = 128


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
    quiet = args.json
    if not quiet:
        legend = Palette(llm.engine.drafter.default_drafters).legend() if wants_colour() else ""
        print(f"{llm.config.model}, drafter {llm.engine.drafter.name}, greedy. {legend}\n")
    comparisons = [_compare(llm, name, text, quiet) for name, text in PROMPTS.items()]
    if not quiet:
        print("\n".join(table(comparisons)))
    output_result({"model": llm.config.model, "prompts": [each.as_json() for each in comparisons]}, args)
    return 0 if all(each.same_text for each in comparisons) else 1


def _compare(llm: LLM, name: str, text: str, quiet: bool) -> Comparison:
    """Stream the output with speculation, then generate it without."""
    from foretell.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=MAX_TOKENS)
    prompt = _encode(llm, text)
    if not quiet:
        print(f"--- {name}: {json.dumps(text[:90] + ('...' if len(text) > 90 else ''))}")
    _generate(
        llm, prompt, SamplingParams(max_tokens=4), speculate=True
    )  # warm-up: the prefix cache has the prompt for both sides
    speculative = _generate(
        llm, prompt, params, speculate=True, renderer=None if quiet else stream_renderer(llm, prompt, True)
    )
    if not quiet:
        print("\n    ... and without speculation, to compare\n")
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


def table(comparisons: list[Comparison]) -> list[str]:
    """Return the comparison as table lines."""
    lines = [f"{'prompt':8}{'tokens':>8}{'per step':>9}{'plain':>12}{'speculative':>13}{'ratio':>8}  same text"]
    for each in comparisons:
        lines.append(
            f"{each.name:8}{len(each.speculative.tokens):>8}{each.speculative.accepted_per_step:>9.2f}"
            f"{each.plain.tokens_per_second:>8.1f} t/s{each.speculative.tokens_per_second:>9.1f} t/s"
            f"{each.ratio:>7.2f}x  {'yes' if each.same_text else 'NO'}"
        )
    return lines


DEMO = Command("compare two prompts with and without speculation", add_report_arguments, run)
