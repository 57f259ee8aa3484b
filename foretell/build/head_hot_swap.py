"""Hot swap of a draft head: loaded alongside a running engine, and used if it is more accurate than the served one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretell.draft.heads.wiring_check import CHECK_PROMPTS, accuracy, generate_samples
from foretell.engine.engine import Engine
from foretell.errors import ForetellError, ModelError
from foretell.hub.checkpoint import CONFIG, WEIGHTS
from foretell.models.draft_heads import AssistantConfig, DraftHead, HeadConfig, TargetWeights
from foretell.models.draft_heads.loading import open_head, pack_head

Signature = tuple[float, int, float]  # mtime and size of the weights, mtime of the config
MAX_PROMPT = 256  # tokens of a prompt to measure with
MAX_SEQUENCES = 4  # running sequences whose prefixes are used as prompts


@dataclass(frozen=True)
class HeadCandidate:
    """A head that can replace the served one of the same shape."""

    name: str  # the drafter
    head: DraftHead[Any]


class HeadHotSwap:
    """Watches a folder, and replaces the served head of the same shape by the one in it."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        if not engine.drafter.heads:
            raise ModelError("no draft head is served that another could replace; name one with --drafter")
        if engine.runner.model.shard is not None:
            raise ModelError(
                "a new head needs the weights of the whole target, which is sharded over several ranks; use one rank"
            )
        if not engine.runner.model.can_share_weights:
            raise ModelError("a new head shares the target's output matrix, which is packed and no longer available")
        self.folder, self.engine = folder, engine
        self._seen = self.signature()
        self._postponed: HeadCandidate | None = None  # not measured yet

    def signature(self) -> Signature | None:
        """Return what identifies the head in the folder; None if there is none."""
        try:
            weights, config = (self.folder / WEIGHTS).stat(), (self.folder / CONFIG).stat()
        except OSError:
            return None
        return weights.st_mtime, weights.st_size, config.st_mtime

    def load_candidate(self) -> HeadCandidate | None:
        """Load the folder's head if it is new or not measured yet; runs outside of the engine's thread."""
        signature = self.signature()
        if signature is None or signature == self._seen:
            return self._postponed
        self._seen, self._postponed = signature, None
        runner = self.engine.runner
        opened = open_head(self.folder, runner.model.config)
        if isinstance(opened.config, AssistantConfig):
            raise ModelError(f"{self.folder}: an assistant is not replaced while it drafts; start again with it")
        for name, drafter in self.engine.drafter.heads.items():
            if _shape(drafter.head.config) == _shape(opened.config):
                head = opened.load(TargetWeights.of(runner.model), runner.model.dtype, runner.context)
                pack_head(head, runner.model)
                return HeadCandidate(name, head)
        raise ModelError(f"{self.folder}: the head has another shape than the served one")

    @torch.inference_mode()
    def replace_if_better(self, candidate: HeadCandidate) -> str:
        """Replace the served head if the candidate is more accurate, and return what was done, "" if reported before.

        Runs between two steps, in the engine's thread. Without sequences to measure with, or without pages for them,
        nothing is decided, and `load_candidate` returns the candidate again.
        """
        drafter = self.engine.drafter.heads[candidate.name]
        samples = generate_samples(self.engine.runner, self._prompts())
        is_new = candidate is not self._postponed
        self._postponed = None if samples else candidate
        if not samples:
            return (
                f"{self.folder}: not measured yet for lack of free KV pages or prompts; will be retried"
                if is_new
                else ""
            )
        before, after = accuracy(drafter.head, samples), accuracy(candidate.head, samples)
        figures = f"first-token accuracy {after:.0%}, served head {before:.0%}"
        if after <= before:
            return f"{self.folder}: not used: {figures}"
        drafter.replace_head(candidate.head)
        self.engine.scheduler.recompute_all()  # the KV of the old head is in the pages
        return f"{self.folder}: replaced the head of {candidate.name}: {figures}"

    def _prompts(self) -> list[list[int]]:
        """Return prefixes of running sequences, or built-in prompts if none runs."""
        max_tokens = min(MAX_PROMPT, self.engine.runner.context // 2)  # the other half is for generated tokens
        running = [seq.tokens[:max_tokens] for seq in self.engine.scheduler.running[-MAX_SEQUENCES:]]
        if running or self.engine.tokenizer is None:
            return running
        return [self.engine.tokenizer.encode(text) for text in CHECK_PROMPTS]


def load_or_report(hot_swap: HeadHotSwap) -> HeadCandidate | str | None:
    """Load the candidate, or return why it cannot be loaded; the folder is read again when it changes."""
    try:
        return hot_swap.load_candidate()
    except (ForetellError, OSError, ValueError) as error:
        return str(error)


def _shape(config: HeadConfig) -> HeadConfig:
    """Return the part of a config that decides which tensors a head has and what it keeps in the KV cache."""
    return replace(config, accuracy=(), target="")
