"""foretell explain: what steps cost here, when guesses pay, and what would be chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError

from .common import Command, add_report_arguments, check_out, give, load_llm

if TYPE_CHECKING:
    from foretell.control.adaptive import AdaptiveController
    from foretell.utils.speculation_math import SpeculationCosts

BATCHES, LENGTHS = (1, 4, 16, 64), (1, 2, 4, 8, 16)
RATES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


def run(args: argparse.Namespace) -> int:
    check_out(args)
    llm = load_llm(args)
    from foretell.control.adaptive import AdaptiveController

    controller = llm.engine.controller
    assert isinstance(controller, AdaptiveController), "an engine is built with one"
    if not controller.traits:
        raise RequestError("drafter", "none guesses nothing, so there is nothing to explain; name another")
    llm.measure()
    found = {
        "model": llm.config.model,
        "step_ms": {rows: round(1e3 * controller.costs.seconds(rows), 3) for rows in (1, 2, 4, 8, 16, 32, 64)},
        "drafters": {name: explained(controller, name) for name in llm.engine.drafter.default_drafters},
    }
    give(found, args)
    if not args.json:
        print("\n".join(told(found)))
    return 0


def explained(controller: AdaptiveController, arm: str) -> dict[str, Any]:
    """When a drafter pays, and how far it would be let to guess."""
    prices, settings = prices_of(controller, arm), controller.settings
    return {
        "draft_ms": {nodes: round(1e3 * prices.draft_seconds(1, nodes), 3) for nodes in LENGTHS},
        "break_even": {
            texts: {nodes: rounded(prices.break_even(texts, nodes)) for nodes in LENGTHS} for texts in BATCHES
        },
        "choice": {
            texts: {rate: prices.best_length(texts, rate, settings.max_draft_tokens, settings.margin) for rate in RATES}
            for texts in BATCHES
        },
    }


def prices_of(controller: AdaptiveController, arm: str) -> SpeculationCosts:
    from foretell.utils.speculation_math import SpeculationCosts

    curve = controller.costs.curve(max(BATCHES) * (1 + max(controller.settings.max_draft_tokens, *LENGTHS)))
    free, costs = controller.traits[arm].free, controller.draft_costs[arm]

    def draft(texts: int, nodes: int) -> float:
        return 0.0 if free or not nodes else costs.seconds(nodes, nodes * texts, 0, float(curve[1]))

    return SpeculationCosts(lambda texts, nodes: float(curve[texts * (1 + nodes)]), draft)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def told(found: dict[str, Any]) -> list[str]:
    steps = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in found["step_ms"].items())
    lines = [f"{found['model']}: milliseconds of a step by the rows it runs: {steps}"]
    for name, about in found["drafters"].items():
        drafting = ", ".join(f"{nodes}: {ms:.1f}" for nodes, ms in about["draft_ms"].items())
        lines += ["", f"{name}: milliseconds to draft so many tokens for one text: {drafting}"]
        lines += ["  how often a guess must stand for a draft of that length to pay:"]
        lines += ["    texts at once " + "".join(f"{nodes:>8}" for nodes in LENGTHS)]
        for texts, needs in about["break_even"].items():
            shown = "".join(f"{'never' if need is None else format(need, '.2f'):>8}" for need in needs.values())
            lines.append(f"    {texts:>13} {shown}")
        lines += ["  tokens it would guess, and the speed against plain, where guesses stand as often as:"]
        lines += ["    texts at once " + "".join(f"{rate:>11}" for rate in next(iter(about["choice"].values())))]
        for texts, choices in about["choice"].items():
            shown = "".join(f"{f'{nodes} ({gain:.2f}x)':>11}" for nodes, gain in choices.values())
            lines.append(f"    {texts:>13} {shown}")
    return lines


EXPLAIN = Command("show what steps and drafts cost here and when guessing pays", add_report_arguments, run)
