"""The answers in a run's folder, reused only where target, settings and prompt are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from .fingerprint import Fingerprint
from .sampler import Wish
from .token_dataset import FILE, Document, load_documents, load_fingerprint, save_documents


@dataclass
class KeptAnswers:
    """The answers file of one run."""

    folder: Path
    fingerprint: Fingerprint
    say: Callable[[str], None]
    reports: bool = True  # whether to say how many answers are reused
    _others: list[Document] = field(default_factory=list)  # of prompts this call is not about, kept in the file

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @cached_property
    def _found(self) -> dict[int, Document]:
        """The file's documents by index; none where another target or other settings wrote them."""
        if not self.path.is_file():
            return {}
        documents, before = load_documents(self.path), load_fingerprint(self.path)
        if before == self.fingerprint:
            return {each.index: each for each in documents}
        reason = "an older version wrote it, without a fingerprint"
        if before is not None:
            names = [name for name, value in self.fingerprint.items() if before.get(name) != value]
            reason = f"{', '.join(names)} not the same" if names else "other settings"
        aside = self.path.with_name("answers.old.npz")
        self.path.replace(aside)
        self.say(f"{self.path}: none of {len(documents)} answers is reused ({reason}); they are now in {aside.name}")
        return {}

    def matching(self, wishes: Sequence[Wish], beyond: int) -> dict[int, Document]:
        """Return the documents that answer these prompts; those of indices from `beyond` on stay in the file."""
        self._others = [each for index, each in self._found.items() if index >= beyond]
        known = [(wish, self._found[wish.index]) for wish in wishes if wish.index in self._found]
        same = {wish.index: document for wish, document in known if _answers(document, wish)}
        if known and self.reports:
            changed = f", {len(known) - len(same)} not: their prompts differ" if len(same) < len(known) else ""
            self.say(f"{self.path}: {len(same)} of {len(wishes)} answers reused{changed}")
        return same

    def save(self, documents: Sequence[Document]) -> None:
        save_documents([*documents, *self._others], self.path, self.fingerprint)


def _answers(document: Document, wish: Wish) -> bool:
    """Return whether a document begins with this prompt and was sampled at this temperature."""
    same = document.prompt == wish.prompt
    return same and np.float32(document.temperature) == np.float32(wish.temperature)
