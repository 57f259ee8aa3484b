"""What the engine made of guesses at a set rate, for people: Markdown that can go into a page as it is."""

from __future__ import annotations

from .intervals import shown
from .synthetic import TOLERANCE, SyntheticCell, SyntheticFindings

HEAD = ("right", "guesses", "at once", "kept", "accepted per step", "by the law", "off", "ratio to plain", "same text")
WORDS = {"sequence": "each text by itself", "batch": "all in step"}


def markdown(findings: SyntheticFindings) -> str:
    """A row for each setting and batch size."""
    lines = [HEAD, ["---:"] * 3 + ["---"] + ["---:"] * 4 + ["---"], *map(_row, findings.cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: SyntheticFindings) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        "An oracle made the guesses: this is the engine's speed at a known acceptance, and no model's.",
        "The law: (1 - a^(k+1)) / (1 - a) tokens a step where each of k guesses is right with a chance of a; all in "
        "step, a guess counts where it stands for every text of the batch. Steps with fewer than k guesses are left "
        "out of accepted per step.",
    ]
    for batch in dict.fromkeys(cell.batch for cell in findings.cells):
        gains = [f"{a.speedup / b.speedup:.2f}" for a, b in _pairs(findings, batch)]
        if gains:
            lines.append(f"{batch} at once: each text by itself is {', '.join(gains)} times as fast as all in step.")
    for cell in findings.cells:
        where = f"{cell.length} guesses right at {cell.rate:g}, {cell.batch} at once, {WORDS[cell.mode]}"
        if not cell.holds:
            lines.append(f"OFF THE LAW by {cell.off:.1%} (at most {TOLERANCE:.0%} will do): {where}.")
        if not cell.same_text:
            lines.append(f"NOT THE SAME TEXT: {where}.")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _pairs(findings: SyntheticFindings, batch: int) -> list[tuple[SyntheticCell, SyntheticCell]]:
    """The same guesses, kept text by text and in step."""
    found = {(cell.rate, cell.length, cell.mode): cell for cell in findings.cells if cell.batch == batch}
    return [(cell, found[rate, length, "batch"]) for (rate, length, mode), cell in found.items() if mode == "sequence"]


def _row(cell: SyntheticCell) -> list[str]:
    return [
        f"{cell.rate:g}",
        str(cell.length),
        str(cell.batch),
        WORDS[cell.mode],
        f"{cell.accepted_per_step:.2f}",
        f"{cell.expected_per_step:.2f}",
        f"{cell.off:.1%}",
        shown(cell.speedup, cell.speedup_interval),
        "yes" if cell.same_text else "NO",
    ]
