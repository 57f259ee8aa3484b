"""What peers did, for people: Markdown that can go into a page as it is."""

from __future__ import annotations

from .compare import ALL, CompareCell, CompareFindings
from .intervals import shown

HEAD = ("task", "who", "tokens/s", "first token p50 / p90, ms", "accepted per step", "ratio to {}", "same text as {}")


def markdown(findings: CompareFindings) -> str:
    """A row for each task and peer."""
    head = [word.format(findings.baseline) for word in HEAD]
    lines = [head, ["---"] * 2 + ["---:"] * 5, *map(_row, (*findings.cells, *findings.overall))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: CompareFindings) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        f"Tokens a second behind the first words, medians; the ratio is {findings.baseline}'s time a token over the "
        "peer's, by pairs of the same prompt and round, with a 95% t interval over prompts and rounds.",
        "Accepted per step counts the target's own token; - where a peer does not tell. Peers that round their weights "
        "otherwise may well write another text.",
    ]
    for cell in findings.cells:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in cell.reasons.items())
        if reasons:
            lines.append(f"ERRORS, {cell.arm}, {cell.task}: {reasons}.")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _row(cell: CompareCell) -> list[str]:
    first = cell.first_token
    return [
        "all" if cell.task == ALL else cell.task,
        cell.arm,
        number(cell.tokens_per_second, 1),
        "-" if first is None else f"{1000 * first.p50:.0f} / {1000 * first.p90:.0f}",
        number(cell.accepted_per_step, 2),
        shown(cell.speedup, cell.speedup_interval),
        "-" if cell.same_text is None else f"{cell.same_texts} of {cell.texts}",
    ]


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
