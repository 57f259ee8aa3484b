"""What a server did under load, for people: Markdown that can go into a page as it is."""

from __future__ import annotations

from .intervals import shown
from .latency import Latency
from .load import ON, LoadCell, LoadFindings

HEAD = (
    "load",
    "speculation",
    "requests",
    "errors",
    "tokens/s",
    "first token p50 / p99, ms",
    "a token p50 / p99, ms",
    "ratio to off",
    "accepted per step",
    "same text",
)


def markdown(findings: LoadFindings) -> str:
    """A row for each load and arm."""
    lines = [HEAD, ["---"] * 2 + ["---:"] * (len(HEAD) - 2), *map(_row, findings.cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: LoadFindings) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        "Ratio: tokens a second over those with speculation off, by pairs of slices (where callers come at a rate: of "
        "one text, behind its first words)."
    ]
    if all(cell.arm != ON for cell in findings.cells):
        lines.append(
            "A fixed length is a setting of the server and no request can ask for one: off and auto are compared. "
            "--fixed-url names a server that was started with --num-speculative-tokens."
        )
    for load, ratio in findings.auto_over_better.items():
        lines.append(f"{load}: auto is {ratio:.2f} of the better of the others.")
    for cell in findings.cells:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in cell.reasons.items())
        if cell.same_text is False:
            lines.append(f"NOT THE SAME TEXT as with speculation off: {cell.load}, {cell.arm}.")
        if reasons:
            lines.append(f"ERRORS, {cell.load}, {cell.arm}: {reasons}.")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _row(cell: LoadCell) -> list[str]:
    return [
        cell.load,
        cell.arm,
        str(cell.requests),
        str(cell.errors),
        f"{cell.tokens_per_second:.1f}",
        _waits(cell.first_token),
        _waits(cell.per_token),
        shown(cell.speedup, cell.speedup_interval),
        "-" if cell.accepted_per_step is None else f"{cell.accepted_per_step:.2f}",
        {True: "yes", False: "NO", None: "-"}[cell.same_text],
    ]


def _waits(times: Latency | None) -> str:
    return "- / -" if times is None else f"{1000 * times.p50:.1f} / {1000 * times.p99:.1f}"
