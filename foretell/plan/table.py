"""A plan as tables and terminal plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from foretell.plan.memory import GIB
from foretell.plan.planner import PlanResult, PlanRow
from foretell.utils.report_table import ReportTable

Curve = Sequence[tuple[float, float]]

PLOT_COLUMNS, PLOT_LINES = 60, 14
MARKS = "ox+#@%"  # one per curve
BEST_MARK = "*"


def text_plot(title: str, curves: Mapping[str, Curve], best: str, logarithmic: bool = False) -> str:
    """Return several curves in one plot. The curve named `best` is marked with a star and plotted last."""
    marks = {name: BEST_MARK if name == best else MARKS[i % len(MARKS)] for i, name in enumerate(curves)}
    points = [point for curve in curves.values() for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(1.0, max(y for _, y in points))
    cells = [[" "] * PLOT_COLUMNS for _ in range(PLOT_LINES)]
    even = _plot_line(1.0, top)
    cells[even] = ["·"] * PLOT_COLUMNS
    for name, curve in sorted(curves.items(), key=lambda pair: pair[0] == best):
        for x, y in curve:
            cells[_plot_line(y, top)][_plot_column(x, left, right, logarithmic)] = marks[name]
    lines = [f"{_plot_label(line, top, even):>6} |{''.join(row).rstrip()}" for line, row in enumerate(cells)]
    foot = f"{'':>6} +{'-' * PLOT_COLUMNS}"
    ends = f"{'':>8}{left:g}{f'{right:g}':>{PLOT_COLUMNS - len(f'{left:g}')}}"
    legend = "  ".join(f"{mark} {name}" for name, mark in marks.items())
    return "\n".join([title, *lines, foot, ends, f"{'':>8}{legend}"])


def _plot_line(value: float, top: float) -> int:
    return min(PLOT_LINES - 1, max(0, round((PLOT_LINES - 1) * (1 - value / top))))


def _plot_label(line: int, top: float, even: int) -> str:
    if line == even:
        return "1.00"
    return f"{top:.2f}" if line == 0 else "0" if line == PLOT_LINES - 1 else ""


def _plot_column(x: float, left: float, right: float, logarithmic: bool) -> int:
    if right == left:
        return 0
    share = math.log(x / left) / math.log(right / left) if logarithmic else (x - left) / (right - left)
    return round((PLOT_COLUMNS - 1) * share)


SPEED_HEAD = (
    "speedup",
    "plain tokens/s",
    "tokens/s",
    "plain $/M tokens",
    "$/M tokens",
    "memory GiB",
)
STEP_HEAD = (
    "plain step ms",
    "draft length",
    "draft ms",
    "verify ms",
    "host ms",
    "step ms",
    "accepted per step",
    "break-even acceptance",
)
SPLIT_HEAD = (
    "TP",
    "replicas",
    "all-reduce ms",
    "plain step ms",
    "speedup",
    "tokens/s",
    "$/M tokens",
    "memory GiB",
)
BEST = "best length"


def tables(found: PlanResult) -> list[ReportTable]:
    """Return speed and steps by batch and context, and the tensor parallel sizes of the largest batch."""
    contexts = found.query.contexts
    several = len(contexts) > 1
    head = ["batch", "context"] if several else ["batch"]
    at = "" if several else f", {contexts[0]} tokens of context"

    def by_batch(name: str, columns: Sequence[str], cells: Callable[[PlanRow], list[str]]) -> ReportTable:
        rows = [[str(row.batch), *([str(row.context)] if several else []), *cells(row)] for row in found.rows]
        return ReportTable([*head, *columns], rows, words=0, title=f"{name}{at}")

    blocks = [
        by_batch("Speed, price and memory", SPEED_HEAD, _speed_cells),
        by_batch("Parts of a step", STEP_HEAD, _step_cells),
    ]
    if found.splits:
        row = found.splits[0][1]
        name = f"Other tensor parallel (TP) sizes, batch {row.batch}, {row.context} tokens"
        rows = [_split_row(found, split, row) for split, row in found.splits]
        blocks.append(ReportTable(SPLIT_HEAD, rows, words=0, title=name))
    return blocks


def title(found: PlanResult) -> str:
    """Return one line that describes the query."""
    query, target = found.query, found.query.target
    split = "" if query.devices == 1 else f" x {query.devices}, tensor parallel {target.tensor_parallel}"
    return (
        f"{target.shape.name} ({target.shape.weights / 1e9:.3g} billion weights, {target.precision.name}) on "
        f"{target.device.description}{split}; drafter {query.drafter.name}, acceptance {query.acceptance:.0%}; "
        f"${query.dollars_per_hour:.2f} an hour."
    )


def plots(found: PlanResult) -> str:
    """Return the plots of the speedup by batch and by acceptance."""
    context = found.query.contexts[0]
    by_batch = text_plot(f"Speedup by batch, {context} tokens", batch_curves(found), BEST, logarithmic=True)
    by_rate = text_plot("Speedup by acceptance, best length", rate_curves(found), best="")
    return f"{by_batch}\n\n{by_rate}"


def batch_curves(found: PlanResult) -> dict[str, Curve]:
    """Return the speedup by batch, one curve per draft length and one for the best."""
    lengths = list(next(iter(found.by_length.values())))
    curves: dict[str, Curve] = {
        f"{length} token{'s' * (length > 1)}": [(batch, ratios[length]) for batch, ratios in found.by_length.items()]
        for length in lengths
    }
    context = found.query.contexts[0]
    curves[BEST] = [(row.batch, row.speedup) for row in found.rows if row.context == context]
    return curves


def rate_curves(found: PlanResult) -> dict[str, Curve]:
    return {f"batch {batch}": list(ratios.items()) for batch, ratios in found.by_acceptance.items()}


def _speed_cells(row: PlanRow) -> list[str]:
    return [
        _speedup(row),
        f"{row.tokens_per_second(row.plain):,.0f}",
        f"{row.tokens_per_second(row.speculative):,.0f}",
        f"{row.dollars(row.plain):.2f}",
        f"{row.dollars(row.speculative):.2f}",
        _memory(row),
    ]


def _step_cells(row: PlanRow) -> list[str]:
    step = row.speculative
    parts = (step.draft_seconds, step.verify_seconds, step.host_seconds, step.seconds)
    return [
        _milliseconds(row.plain.seconds),
        str(step.length),
        *map(_milliseconds, parts),
        f"{step.tokens:.2f}",
        "never" if row.break_even is None else f"{row.break_even:.2f}",
    ]


def _split_row(found: PlanResult, split: int, row: PlanRow) -> list[str]:
    target = replace(found.query.target, tensor_parallel=split)
    exchange = target.step(max(1.0, row.batch / row.replicas), 1, row.context).exchange
    return [
        str(split),
        str(row.replicas),
        _milliseconds(exchange),
        _milliseconds(row.plain.seconds),
        _speedup(row),
        f"{row.tokens_per_second(row.speculative):,.0f}",
        f"{row.dollars(row.speculative):.2f}",
        _memory(row),
    ]


def _speedup(row: PlanRow) -> str:
    """Return the ratio with a word; a step without drafts is plain decoding."""
    ratio = f"{row.speedup:.2f}x"
    if ratio == "1.00x":
        return ratio
    return f"{ratio} {'faster' if row.speedup > 1 else 'slower'}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.{2 if seconds < 0.1 else 1}f}"


def _memory(row: PlanRow) -> str:
    size = f"{row.memory.total / GIB:.1f}"
    return size if row.memory.fits else f"{size} too big"
