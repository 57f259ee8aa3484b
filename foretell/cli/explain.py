"""foretell explain: step costs on this machine, break-even acceptance rates, and chosen draft lengths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError

from .columns import print_columns
from .common import Command, add_report_arguments, check_output_path, load_llm, output_result

if TYPE_CHECKING:
    from foretell.control.adaptive import AdaptiveController
    from foretell.utils.speculation_math import SpeculationCosts

BATCHES, LENGTHS = (1, 4, 16, 64), (1, 2, 4, 8, 16)
RATES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    llm = load_llm(args)
    from foretell.control.adaptive import AdaptiveController

    controller = llm.engine.controller
    assert isinstance(controller, AdaptiveController), "an engine is built with one"
    if not controller.traits:
        raise RequestError("drafter", "none never drafts, so there is nothing to explain; name another")
    llm.measure()
    found = {
        "model": llm.config.model,
        "step_ms": {rows: round(1e3 * controller.costs.seconds(rows), 3) for rows in (1, 2, 4, 8, 16, 32, 64)},
        "drafters": {name: explain_drafter(controller, name) for name in llm.engine.drafter.default_drafters},
    }
    output_result(found, args)
    if not args.json:
        print_report(found)
    return 0


def explain_drafter(controller: AdaptiveController, drafter: str) -> dict[str, Any]:
    """Return a drafter's cost, break-even acceptance rates and best draft lengths."""
    prices, settings = step_prices(controller, drafter), controller.settings
    return {
        "draft_ms": {nodes: round(1e3 * prices.draft_seconds(1, nodes), 3) for nodes in LENGTHS},
        "break_even": {
            batch: {nodes: round_rate(prices.break_even(batch, nodes)) for nodes in LENGTHS} for batch in BATCHES
        },
        "choice": {
            batch: {rate: prices.best_length(batch, rate, settings.max_draft_tokens, settings.margin) for rate in RATES}
            for batch in BATCHES
        },
    }


def step_prices(controller: AdaptiveController, drafter: str) -> SpeculationCosts:
    from foretell.utils.speculation_math import SpeculationCosts

    curve = controller.costs.curve(max(BATCHES) * (1 + max(controller.settings.max_draft_tokens, *LENGTHS)))
    free, costs = controller.traits[drafter].is_free, controller.draft_costs[drafter]

    def draft(batch: int, nodes: int) -> float:
        return 0.0 if free or not nodes else costs.seconds(nodes, nodes * batch, 0, float(curve[1]))

    return SpeculationCosts(lambda batch, nodes: float(curve[batch * (1 + nodes)]), draft)


def round_rate(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def print_report(found: dict[str, Any]) -> None:
    """Print the costs of steps and drafts, and two tables for each drafter."""
    print(f"{found['model']}: step time in ms by number of tokens: {milliseconds(found['step_ms'])}")
    for name, about in found["drafters"].items():
        drafting = milliseconds(about["draft_ms"])
        print(f"\n{name}: draft time in ms by number of draft tokens, one sequence: {drafting}")
        rows = [
            (str(batch), *("never" if need is None else f"{need:.2f}" for need in needs.values()))
            for batch, needs in about["break_even"].items()
        ]
        print_matrix("break-even acceptance rate by batch size and draft length", LENGTHS, rows)
        rows = [
            (str(batch), *(f"{nodes} ({gain:.2f}x)" for nodes, gain in choices.values()))
            for batch, choices in about["choice"].items()
        ]
        print_matrix("chosen draft length and expected speedup by batch size and acceptance rate", RATES, rows)


def milliseconds(by_count: dict[int, float]) -> str:
    """Format times by number of tokens."""
    return ", ".join(f"{count}: {ms:.1f}" for count, ms in by_count.items())


def print_matrix(title: str, heads: Sequence[float], rows: list[tuple[str, ...]]) -> None:
    """Print a table of figures by batch size."""
    print(f"\n{title}:")
    print_columns(("batch size", *map(str, heads)), rows, right=range(len(heads) + 1))


EXPLAIN = Command("show step and draft costs on this machine and when speculation pays", add_report_arguments, run)
