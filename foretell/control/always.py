"""A set number of guesses in every step, whatever they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from foretell.types import Budget, Draft, Sequence

from .lessons import Lessons
from .settings import ArmTraits, Presence, Settings


class Always:
    """Of several drafters the one most of whose guesses should stand; who is away is called."""

    def __init__(
        self,
        arms: Mapping[str, ArmTraits],
        settings: Settings,
        lessons: Lessons,
        presence: Presence,
        call: Callable[[str], None],
    ) -> None:
        self.arms, self.settings, self.lessons = arms, settings, lessons
        self.presence, self.call = presence, call

    def budget(self, seq: Sequence, offered: Mapping[str, Draft], nodes: int, writers: int) -> Budget:
        """For one of `writers` texts, with what free drafters have for it; no nodes where nobody has any."""
        count = min(nodes, self.settings.cap(seq))
        away = self.presence.away.intersection(seq.request.drafters)
        for arm in away:
            self.call(arm)
        here = [arm for arm in seq.request.drafters if arm not in away]
        arm = self.lessons.likeliest(seq, here, offered, count) if count else ""
        if not arm:
            return Budget()
        most = self.settings.tree_cap(seq, writers) if self.arms[arm].grows else 0
        return Budget(most, arm, levels=count) if most > count else Budget(count, arm)
