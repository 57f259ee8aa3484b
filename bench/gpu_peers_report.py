"""What `gpu_peers.py` found: lines of JSON as they come, and tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from engine_child import Taken

OURS, VLLM = "foretell", "vllm plain"
PLAIN, ONE, MANY, FIRST = "plain", "batch 1", "batch 32", "first token"
SAME = 32  # first tokens compared: in half precision outputs of two engines differ sooner or later


def first_ms(taken: Taken) -> float:
    """Milliseconds until the first token of a prompt."""
    return 1e3 * median(taken.each)


@dataclass(frozen=True)
class Goal:
    """A ratio of ours over vLLM's that was asked for."""

    cell: str
    sign: str
    ratio: float

    def of(self, taken: Taken) -> float:
        return first_ms(taken) if self.cell == FIRST else taken.rate

    @property
    def unit(self) -> str:
        return "ms" if self.cell == FIRST else "tokens/s"

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.ratio if self.sign == ">=" else ratio <= self.ratio


GOALS = (Goal(ONE, ">=", 1.1), Goal(MANY, ">=", 0.97), Goal(FIRST, "<=", 1.2))


@dataclass
class Report:
    """Everything that was measured, and what was not."""

    out: Path | None = None
    found: dict[tuple[str, str, str], list[Taken]] = field(default_factory=dict)
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def rounds(self, engine: str, way: str, cell: str) -> int:
        """How often it was measured."""
        return len(self.found.get((engine, way, cell), []))

    def add(self, engine: str, way: str, cell: str, taken: Taken) -> None:
        self.found.setdefault((engine, way, cell), []).append(taken)
        message = {"tokens_per_second": round(taken.rate, 1)} if cell != FIRST else {"ms": round(first_ms(taken), 2)}
        message |= {"tokens_per_step": round(taken.per_step, 3), "step_ms": round(taken.step_ms, 3)}
        message |= {"seconds": round(sum(taken.each), 3), "same": self.same(engine, way, cell)}
        self.say(json.dumps({"engine": engine, "way": way, "cell": cell, **message}))

    def ready(self, engine: str, seconds: float, about: dict[str, Any], at_once: int) -> None:
        self.loaded[engine] = about | {"ready": seconds, "at_once": at_once}
        self.say(json.dumps({"engine": engine, "ready_s": round(seconds, 1), "started_at_once": at_once, **about}))

    def lost(self, engine: str, why: str) -> None:
        self.missing.append(f"{engine}: lost {why}")
        self.say(json.dumps({"engine": engine, "lost": why}))

    def unreached(self, what: str) -> None:
        self.missing.append(f"{what}: not reached in the time there was")

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(text + "\n")

    def same(self, engine: str, way: str, cell: str) -> float | None:
        """Count outputs equal to plain ones: ours in full; vLLM's, and ours against vLLM's, by first tokens."""
        other = (OURS, PLAIN, cell) if (engine, way) != (OURS, PLAIN) else (VLLM, PLAIN, cell)
        if other not in self.found or (engine, way, cell) not in self.found:
            return None
        outputs = [self.found[key][-1].outputs for key in ((engine, way, cell), other)]
        length = None if engine == OURS and way != PLAIN else SAME
        equal = [a[:length] == b[:length] for a, b in zip(*outputs, strict=True)]
        return round(sum(equal) / len(equal), 3)

    def tell(self) -> None:
        """The tables, of whatever is there."""
        self.say("\n".join(["", *self._goals(), "", *self._ways(), "", *self._starts(), ""]))
        for each in self.missing:
            self.say(f"Not measured: {each}")

    def _starts(self) -> list[str]:
        lines = ["| ready after | seconds | of so many started at once | |", "|---|---:|---:|---|"]
        for engine, message in self.loaded.items():
            about = {name: value for name, value in message.items() if name not in ("ready", "at_once")}
            lines.append(f"| {engine} | {message['ready']:.1f} | {message['at_once']} | {json.dumps(about)} |")
        return lines

    def _goals(self) -> list[str]:
        lines = ["| plain | foretell | vLLM | ours over theirs | asked | met |", "|---|---:|---:|---:|---|---|"]
        for goal in GOALS:
            ours, theirs = (self.found.get((name, PLAIN, goal.cell), []) for name in (OURS, VLLM))
            if not ours or not theirs:
                asked = f"{goal.sign} {goal.ratio}"
                lines.append(
                    f"| {goal.cell}, {goal.unit} | {_value(goal, ours)} | {_value(goal, theirs)} | | {asked} | |"
                )
                continue
            ratio = median(goal.of(a) / goal.of(b) for a, b in zip(reversed(ours), reversed(theirs), strict=False))
            met = "yes" if goal.is_met(ratio) else "**no**"
            values = f"{_value(goal, ours)} | {_value(goal, theirs)} | {ratio:.3f}"
            lines.append(f"| {goal.cell}, {goal.unit} | {values} | {goal.sign} {goal.ratio} | {met} |")
        return lines

    def _ways(self) -> list[str]:
        lines = [
            "| | cell | tokens/s | of its own plain | tokens a step | ms a step | same text | graphs |",
            "|---|---|---:|---:|---:|---:|---:|---|",
        ]
        for (engine, way, cell), takens in self.found.items():
            if cell == FIRST:
                continue
            own = self.found.get((OURS if engine == OURS else VLLM, PLAIN, cell), [])
            over = f"{median(t.rate for t in takens) / median(t.rate for t in own):.2f}" if own else ""
            loaded = self.loaded.get(engine, {})
            name = f"{engine}, {way}" if engine == OURS else f"{engine} ({loaded.get('method', '')})"
            figures = [
                median(t.rate for t in takens),
                median(t.per_step for t in takens),
                median(t.step_ms for t in takens),
            ]
            lines.append(
                f"| {name} | {cell} | {figures[0]:.1f} | {over} | {figures[1]:.2f} | {figures[2]:.2f} | "
                f"{_blank(self.same(engine, way, cell))} | {loaded.get('graphs', '')} |"
            )
        return lines


def _value(goal: Goal, takens: list[Taken]) -> str:
    return f"{median(goal.of(taken) for taken in takens):.4g}" if takens else ""


def _blank(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
