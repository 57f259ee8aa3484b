"""Rules of .gitignore files. A pattern is matched one path component at a time, so no pattern takes long."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RULES = 1000  # lines of one file that count
ANY_DEPTH = None  # the component `**`

Component = re.Pattern[str] | None


@dataclass(frozen=True)
class IgnoreRule:
    """One pattern, relative to the folder of its .gitignore."""

    components: tuple[Component, ...]
    negated: bool  # `!`: what matches is not ignored after all
    only_folders: bool

    @classmethod
    def parse(cls, line: str) -> IgnoreRule | None:
        """Return the rule of a line; None for a blank line or a comment."""
        pattern = re.sub(r"(?<!\\) +$", "", line)
        negated = pattern.startswith("!")
        pattern = pattern[negated:]
        if not pattern or line.startswith("#"):
            return None
        only_folders = pattern.endswith("/")
        pattern = pattern.rstrip("/")
        names = pattern.lstrip("/").split("/")
        if "/" not in pattern:
            names.insert(0, "**")  # at any depth
        if names[-1] == "**":
            names.append("*")  # everything inside, not the folder itself
        return cls(tuple(map(_component, names)), negated, only_folders)

    def matches(self, path: Sequence[str], is_folder: bool) -> bool:
        """Return whether a path, as components below the folder of the .gitignore, matches."""
        if self.only_folders and not is_folder:
            return False
        reached = {0}  # how many components of the path the pattern so far can have matched
        for component in self.components:
            if component is ANY_DEPTH:
                reached = set(range(min(reached), len(path) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(path) and component.match(path[at])}
            if not reached:
                return False
        return len(path) in reached


def _component(name: str) -> Component:
    if name == "**":
        return ANY_DEPTH
    literal = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], name)
    return re.compile(fnmatch.translate(literal))


def parse_rules(text: str) -> tuple[IgnoreRule, ...]:
    """Return the rules of a .gitignore."""
    return tuple(rule for line in text.splitlines()[:MAX_RULES] if (rule := IgnoreRule.parse(line)) is not None)


@dataclass(frozen=True)
class IgnoreRules:
    """The rules that apply in a folder: its own and those of the folders above it, outermost first."""

    levels: tuple[tuple[int, tuple[IgnoreRule, ...]], ...] = ()  # depth of the folder below the root, and its rules

    def within(self, depth: int, rules: tuple[IgnoreRule, ...]) -> IgnoreRules:
        """Return the rules for a folder with a .gitignore of its own."""
        return IgnoreRules((*self.levels, (depth, rules))) if rules else self

    def ignores(self, path: Sequence[str], is_folder: bool) -> bool:
        """Return whether a path below the root is ignored: the last rule that matches decides."""
        for depth, rules in reversed(self.levels):
            below = path[depth:]
            for rule in reversed(rules):
                if rule.matches(below, is_folder):
                    return not rule.negated
        return False
