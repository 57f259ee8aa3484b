"""What a dozen requests showed, for people."""

from __future__ import annotations

from .check import CheckFindings
from .compare_report import number
from .intervals import shown

HEAD = ("task", "tokens", "tokens/s", "accepted per step", "ratio to none", "same text")


def markdown(findings: CheckFindings) -> str:
    """A row for each task."""
    rows = [
        [
            str(cell["task"]),
            str(cell["tokens"]),
            number(cell["tokens_per_second"], 1),
            number(cell["accepted_per_step"], 2),
            shown(cell["speedup"], cell["speedup_interval"]),
            {True: "yes", False: "NO", None: "-"}[cell["same_text"]],
        ]
        for cell in findings.cells
    ]
    lines = [HEAD, ["---"] + ["---:"] * 4 + ["---"], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: CheckFindings) -> list[str]:
    """The verdict, and what a reader must know."""
    facts = findings.facts
    lines = [
        facts.words,
        f"{facts.requests} requests one after the other in {facts.seconds:.1f} s: "
        f"{facts.requests_per_second:.2f} requests a second.",
    ]
    if facts.same_text is False:
        lines.append("NOT THE SAME TEXT with guesses as without: see the table.")
    for reason, count in findings.reasons.items():
        lines.append(f"ERRORS: {reason} ({count} times).")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines
