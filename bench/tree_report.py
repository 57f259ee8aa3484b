"""What `trees.py` has to say: by setting and way tokens a second, tokens a step, and where a round's time goes."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from statistics import mean

from rounds import Taken

CONTROLLER = "controller"


@dataclass(frozen=True)
class Way:
    """A shape of drafts; `levels` 0 is a chain, or with no nodes plain decoding."""

    nodes: int
    levels: int = 0
    free: bool = False  # as the controller likes, with at most so many nodes

    @property
    def name(self) -> str:
        if self.free:
            return CONTROLLER
        return "plain" if not self.nodes else f"{self.nodes} in {self.levels}" if self.levels else f"chain {self.nodes}"

    @property
    def kind(self) -> str:
        return self.name if self.free or not self.nodes else "tree" if self.levels else "chain"


@dataclass(frozen=True)
class Setting:
    """Sampling parameters and verification rule."""

    temperature: float
    rule: str

    @property
    def name(self) -> str:
        return f"T={self.temperature:g} {self.rule}"


@dataclass(frozen=True)
class Record:
    """One text, written once."""

    setting: Setting
    way: Way
    task: str
    turn: int
    taken: Taken

    def json(self) -> dict[str, object]:
        names = {"setting": self.setting.name, "way": self.way.name, "task": self.task, "turn": self.turn}
        return {**names, **self.taken.json()}


class Report:
    """Everything that was written, shown and kept as it comes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.records: list[Record] = []
        self.others: dict[tuple[str, str], int] = {}  # outputs that differ from the plain ones, by setting and shape
        self.more: dict[str, object] = {}
        self.given, self.out = {name: str(value) for name, value in vars(args).items()}, args.out

    def add(self, records: list[Record], outputs: dict[Way, tuple[int, ...]]) -> None:
        """One text in all ways."""
        self.records += records
        first, plain = records[0], outputs[Way(0)]
        for way, text in outputs.items():
            if first.setting.rule == "match":
                name = (first.setting.name, way.name)
                self.others[name] = self.others.get(name, 0) + (text != plain)
        said = ", ".join(f"{each.way.name} {each.taken.speed:.0f}" for each in records)
        print(f"{first.setting.name}, {first.task}: {said} tokens/s", flush=True)
        self.save()

    def save(self) -> None:
        if self.out is not None:
            settings = list(dict.fromkeys(each.setting for each in self.records))
            found = {setting.name: self.summary(setting) for setting in settings}
            whole = {"given": self.given, "settings": found, **self.more, "texts": [r.json() for r in self.records]}
            self.out.write_text(json.dumps(whole, indent=1))

    def of(self, setting: Setting, way: Way, task: str | None = None) -> Taken:
        some = [each for each in self.records if each.setting == setting and each.way == way]
        return Taken.total(each.taken for each in some if task in (None, each.task))

    def speed(self, setting: Setting, way: Way) -> float:
        """Tokens a second, the mean of the tasks'."""
        tasks = dict.fromkeys(each.task for each in self.records if each.setting == setting)
        return mean(self.of(setting, way, task).speed for task in tasks)

    def summary(self, setting: Setting) -> dict[str, object]:
        """Of each way its speed, its tokens a step and its round's parts; and the best tree over the best chain."""
        ways = list(dict.fromkeys(each.way for each in self.records if each.setting == setting))
        speeds = {way: self.speed(setting, way) for way in ways}
        found: dict[str, object] = {}
        for way in ways:
            taken = self.of(setting, way)
            steps = max(1, taken.steps)
            tasks = dict.fromkeys(each.task for each in self.records if each.setting == setting)
            found[way.name] = {
                "speed": speeds[way],
                "of_plain": speeds[way] / speeds[Way(0)],
                "per_step": taken.tokens / steps,
                "drafted": taken.drafted / steps,
                "other_texts": self.others.get((setting.name, way.name)),
                "milliseconds": taken.round,
                "tasks": {task: self.of(setting, way, task).speed for task in tasks},
            }
        best = {
            kind: max((way for way in ways if way.kind == kind), key=speeds.__getitem__, default=None)
            for kind in ("tree", "chain")
        }
        tree, chain = best["tree"], best["chain"]
        gain = speeds[tree] / speeds[chain] if tree is not None and chain is not None else None
        return {"ways": found, "best": {kind: way and way.name for kind, way in best.items()}, "tree_over_chain": gain}

    def show(self) -> None:
        for setting in dict.fromkeys(each.setting for each in self.records):
            found = self.summary(setting)
            print(f"\n{setting.name}, milliseconds of a round:\n", flush=True)
            print(
                "| | tokens/s | of plain | tokens per step | draft tokens per step "
                "| step | draft | forward | verify | rest |"
            )
            print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
            for name, way in found["ways"].items():  # type: ignore[attr-defined]
                parts = " | ".join(f"{each:.2f}" for each in way["milliseconds"].values())
                print(
                    f"| {name} | {way['speed']:.1f} | {way['of_plain']:.2f} | {way['per_step']:.2f} "
                    f"| {way['drafted']:.1f} | {parts} |"
                )
            print(f"\nbest: {found['best']}, tree over chain {found['tree_over_chain']}", flush=True)
            others = sum(count for (name, _), count in self.others.items() if name == setting.name)
            print(f"outputs that differ from plain: {others}", flush=True)
