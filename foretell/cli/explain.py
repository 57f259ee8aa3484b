"""foretell explain: step costs on this machine, break-even acceptance rates, and chosen draft lengths."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError

from .common import Command, add_report_arguments, check_output_path, load_llm, output_result
from .tables import open_console, print_blocks

if TYPE_CHECKING:
    from foretell.control.adaptive import AdaptiveController
    from foretell.utils.report_table import ReportTable
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
        print_blocks(open_console(), report_blocks(found))
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
        return 0.0 if free or not nodes else costs.prices(float(curve[1])).seconds(nodes, nodes * batch)

    return SpeculationCosts(lambda batch, nodes: float(curve[batch * (1 + nodes)]), draft)


def round_rate(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def report_blocks(found: dict[str, Any]) -> list[str | ReportTable]:
    """Return step costs, and for each drafter break-even acceptance rates and chosen draft lengths."""
    from foretell.utils.report_table import ReportTable

    steps = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in found["step_ms"].items())
    blocks: list[str | ReportTable] = [f"{found['model']}: step time in ms by number of tokens: {steps}"]
    for name, about in found["drafters"].items():
        drafting = ", ".join(f"{nodes}: {ms:.1f}" for nodes, ms in about["draft_ms"].items())
        blocks.append(f"{name}: draft time in ms by number of draft tokens, one sequence: {drafting}")
        needs = [
            [str(batch), *("never" if need is None else f"{need:.2f}" for need in row.values())]
            for batch, row in about["break_even"].items()
        ]
        title = "break-even acceptance rate by batch size and draft length"
        blocks.append(ReportTable(["batch", *map(str, LENGTHS)], needs, words=0, title=f"{name}: {title}"))
        choices = [
            [str(batch), *(f"{nodes} ({gain:.2f}x)" for nodes, gain in row.values())]
            for batch, row in about["choice"].items()
        ]
        title = "chosen draft length and expected speedup by acceptance rate"
        blocks.append(ReportTable(["batch", *map(str, RATES)], choices, words=0, title=f"{name}: {title}"))
    return blocks


EXPLAIN = Command("show step and draft costs on this machine and when speculation pays", add_report_arguments, run)
