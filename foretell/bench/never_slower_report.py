"""What a run of never-slower says to people: Markdown that can go into a page as it is."""

from __future__ import annotations

from .intervals import shown
from .never_slower import Cell, Findings, Overall
from .never_slower_stats import BEST_SHARE, ERROR, PLAIN_SHARE

HEAD = ("task", "T", "batch", "drafter", "accepted per step", "fixed", "bar", "ratio to plain", "verdict", "same text")


def markdown(findings: Findings) -> str:
    """A row for each cell, and one for the mean of each drafter."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(_cell(cell)) for cell in findings.cells]
    return "\n".join([*lines, *(_line(_overall(each)) for each in findings.overall)])


def remarks(findings: Findings) -> list[str]:
    """What a reader of the table must know."""
    count = {verdict: sum(cell.verdict == verdict for cell in findings.cells) for verdict in ("slower", "inconclusive")}
    lines = [
        f"The bar is {PLAIN_SHARE:g} of plain decoding's speed, and {BEST_SHARE:g} of the best fixed length's. "
        f"A cell is held or slower where a one-sided {1 - ERROR:.0%} bound is on that side of its bar.",
        "Ratio: plain decoding's time a token over the adaptive arm's, with a 95% t interval over rounds; timed from "
        "when all texts of a batch have their first token, prompts being cached.",
        f"{findings.verdict.upper()}: {len(findings.cells)} cells, {count['slower']} below the bar, "
        f"{count['inconclusive']} too noisy to tell.",
    ]
    for cell in findings.cells:
        where = f"{cell.drafter}, {cell.task}, T={cell.temperature:g}, {cell.batch} at once"
        if not cell.same_text:
            lines.append(f"NOT THE SAME TEXT: {where}: {'; '.join(cell.differing)}.")
        if cell.drafter_failures:
            lines.append(f"{where}: the drafter FAILED in {cell.drafter_failures} steps; see the log.")
    if findings.stopped is not None:
        last = findings.cells[-1].rounds
        lines.append(f"Stopped before the end: the table has what was finished, its last cell {last} rounds of it.")
    return lines


def _line(columns: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _cell(cell: Cell) -> list[str]:
    fixed = ", ".join(f"{length}: {speedup:.2f}" for length, speedup in cell.fixed.items() if length)
    return [
        cell.task,
        f"{cell.temperature:g}",
        str(cell.batch),
        cell.drafter,
        f"{cell.accepted_per_step:.2f}",
        fixed,
        f"{cell.bar:.2f}",
        shown(cell.speedup, cell.speedup_interval),
        cell.verdict,
        "yes" if cell.same_text else "NO",
    ]


def _overall(each: Overall) -> list[str]:
    accepted, same = f"{each.accepted_per_step:.2f}", "yes" if each.same_text else "NO"
    ratio = shown(each.speedup, each.speedup_interval)
    return [f"mean of {each.cells}", "", "", each.drafter, accepted, "", "", ratio, each.verdict, same]
