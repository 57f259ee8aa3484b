"""A plan for people, as Markdown and plots for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .memory import GIB
from .planner import Forecast, remarks
from .plot import Curve, text_plot
from .result import Row

HEAD = (
    "batch",
    "context",
    "plain step, ms",
    "length",
    "step, ms",
    "drafting / checking / host",
    "accepted per step",
    "ratio to plain",
    "pays from",
    "tokens/s, plain",
    "tokens/s",
    "$/M tokens, plain",
    "$/M tokens",
    "memory, GiB",
)
SPLIT_HEAD = (
    "devices a copy",
    "copies",
    "sums over devices, ms",
    "plain step, ms",
    "length",
    "ratio to plain",
    "tokens/s",
    "$/M tokens",
    "memory, GiB",
)
BEST = "best length"


def markdown(found: Forecast) -> str:
    """What was asked, a row for each batch and context, and how splitting changes the last of them."""
    blocks = [title(found), _table(HEAD, cells(found))]
    if found.splits:
        blocks += [f"{split_title(found)}:", _table(SPLIT_HEAD, split_cells(found))]
    return "\n\n".join([*blocks, *remarks(found)])


def cells(found: Forecast) -> list[list[str]]:
    """The rows of the table, below `HEAD`."""
    return [_columns(row) for row in found.rows]


def title(found: Forecast) -> str:
    """One line that says what was asked."""
    asked, target = found.question, found.question.target
    split = "" if asked.devices == 1 else f" x {asked.devices}, split over {target.split}"
    return (
        f"{target.shape.name} ({target.shape.weights / 1e9:.3g} billion weights, {target.precision.name}) on "
        f"{target.device.about}{split}; guesses by {asked.guesser.name}, of which {asked.acceptance:.0%} stand; "
        f"${asked.dollars_per_hour:.2f} an hour."
    )


def plots(found: Forecast) -> str:
    """The ratio by batch and by acceptance."""
    context = found.question.contexts[0]
    by_batch = text_plot(f"Ratio to plain by batch, {context} tokens", batch_curves(found), BEST, logarithmic=True)
    by_rate = text_plot("Ratio to plain by acceptance, best length", rate_curves(found), best="")
    return f"{by_batch}\n\n{by_rate}"


def batch_curves(found: Forecast) -> dict[str, Curve]:
    """By length, and the best one's."""
    lengths = list(next(iter(found.by_length.values())))
    curves: dict[str, Curve] = {
        f"{length} token{'s' * (length > 1)}": [(texts, ratios[length]) for texts, ratios in found.by_length.items()]
        for length in lengths
    }
    context = found.question.contexts[0]
    curves[BEST] = [(row.texts, row.ratio) for row in found.rows if row.context == context]
    return curves


def rate_curves(found: Forecast) -> dict[str, Curve]:
    return {f"batch {texts}": list(ratios.items()) for texts, ratios in found.by_acceptance.items()}


def _columns(row: Row) -> list[str]:
    parts = " / ".join(f"{1e3 * part:.2f}" for part in (row.guessed.drafting, row.guessed.verifying, row.guessed.host))
    return [
        str(row.texts),
        str(row.context),
        f"{1e3 * row.plain.seconds:.2f}",
        str(row.guessed.length),
        f"{1e3 * row.guessed.seconds:.2f}",
        parts,
        f"{row.guessed.tokens:.2f}",
        f"{row.ratio:.2f}",
        "never" if row.break_even is None else f"{row.break_even:.2f}",
        f"{row.tokens_per_second(row.plain):,.0f}",
        f"{row.tokens_per_second(row.guessed):,.0f}",
        f"{row.dollars(row.plain):.2f}",
        f"{row.dollars(row.guessed):.2f}",
        _memory(row),
    ]


def split_title(found: Forecast) -> str:
    row = found.splits[0][1]
    return f"Split in other ways, batch {row.texts}, {row.context} tokens"


def split_cells(found: Forecast) -> list[list[str]]:
    """The rows of the table of splits, below `SPLIT_HEAD`."""
    return [[str(split), *_split_columns(found, split, row)] for split, row in found.splits]


def _split_columns(found: Forecast, split: int, row: Row) -> list[str]:
    target = replace(found.question.target, split=split)
    exchange = target.step(max(1.0, row.texts / row.copies), 1, row.context).exchange
    return [
        str(row.copies),
        f"{1e3 * exchange:.2f}",
        f"{1e3 * row.plain.seconds:.2f}",
        str(row.guessed.length),
        f"{row.ratio:.2f}",
        f"{row.tokens_per_second(row.guessed):,.0f}",
        f"{row.dollars(row.guessed):.2f}",
        _memory(row),
    ]


def _memory(row: Row) -> str:
    size = f"{row.memory.total / GIB:.1f}"
    return size if row.memory.fits else f"{size}, TOO MUCH"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns line up in a terminal as well."""
    widths = [max(len(head[i]), 4, *(len(row[i]) for row in rows)) for i in range(len(head))]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    rule = " | ".join("-" * (width - 1) + ":" for width in widths)
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))
