"""The texts of a run: what the target answered, some of it kept apart to measure with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from foretell.build.model_source import ModelSource
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.models.decoder import Decoder

from .cost_estimate import format_duration
from .data import TrainPrompt, load_prompts
from .regenerate import MIN_ANSWER_TOKENS, AnswerCache, RegenerateSettings, regenerate
from .settings import Reporter, TrainJob
from .token_dataset import (
    Document,
    answers_fingerprint,
    join_documents,
    load_documents,
    load_fingerprint,
    target_fingerprint,
)

PROBE = {"cuda": 512, "cpu": 16}  # prompts whose answers tell how long all will take


class Corpus:
    """Documents, made when they are first asked for."""

    def __init__(self, order: TrainJob, opened: ModelSource, target: Callable[[], Decoder], reporter: Reporter) -> None:
        self.job, self.config, self.source, self.target = order, order.config, opened, target
        self.reporter = reporter
        self.answered_fraction = 1.0  # of the prompts that are answered

    @cached_property
    def documents(self) -> list[Document]:
        """All there is, in an order of its own; from a file where an earlier run has written it."""
        file = self.config.answers
        found = self._answered() if file is None else self._given(Path(file))
        learnable = [each for each in found if each.num_loss_tokens >= MIN_ANSWER_TOKENS]
        if not learnable:
            raise RequestError(
                "data", f"no answer of {MIN_ANSWER_TOKENS} tokens or more came of it; give other prompts"
            )
        random.Random(self.config.seed).shuffle(learnable)
        return learnable[: self.config.prompts]

    @cached_property
    def target_fingerprint(self) -> str:
        """The hash of the target's files."""
        return target_fingerprint(self.source.checkpoint.path)

    def _given(self, path: Path) -> list[Document]:
        """Return the answers of a file that the user names, with a warning if another target generated them."""
        documents, before = load_documents(path), load_fingerprint(path)
        if before is not None and before.get("target") != self.target_fingerprint:
            self.reporter.log(f"warning: the answers in {path} are another target's")
        return documents

    def _answered(self) -> list[Document]:
        """Some first, to say what all of them will take."""
        assert self.job.data is not None, "there is data where there are no answers"
        asks = load_prompts(self.job.data)
        random.Random(self.config.seed).shuffle(asks)
        asks = asks[: self.config.prompts]
        self.job.out.mkdir(parents=True, exist_ok=True)
        began, few = time.monotonic(), asks[: PROBE[self.source.device.type]]
        part = len(few) / len(asks)
        found = self._written(few, reports=part == 1 or self.job.dry_run)
        if part == 1:
            return found
        if any(not ask.answer_tokens and not ask.is_document for ask in asks):
            left, mib = (time.monotonic() - began) * (1 / part - 1), len(asks) * self.config.context * 2 / 2**20
            self.reporter.log(
                f"{len(asks)} prompts to answer: about {format_duration(left)}, at most {mib:.0f} MiB of disk"
            )
        if self.job.dry_run:
            self.answered_fraction = part
            return found
        return self._written(asks)

    def _written(self, asks: list[TrainPrompt], reports: bool = True) -> list[Document]:
        config = self.config
        writing = RegenerateSettings(config.max_tokens, config.context, config.greedy, config.temperature, config.seed)
        fingerprint = answers_fingerprint(self.target_fingerprint, writing)
        return regenerate(
            asks,
            self.source,
            self.target,
            lambda: LLM(self.job.target, device=config.device, quiet=True),
            writing,
            AnswerCache(self.job.out, fingerprint, self.reporter.log, reports),
            self.reporter.on_answer,
        )

    @property
    def _apart(self) -> int:
        """How many documents are kept to measure with: few of few."""
        return min(self.config.held_out, max(1, len(self.documents) // 10))

    @cached_property
    def held_out(self) -> list[Document]:
        return self.documents[: self._apart]

    @property
    def selection_documents(self) -> list[Document]:
        """The half of the held-out documents that checkpoints are chosen on."""
        return self.held_out[::2]

    @property
    def report_documents(self) -> list[Document]:
        """The other half, for figures that no choice has touched; the same documents where there is only one."""
        return self.held_out[1::2] or self.held_out

    @cached_property
    def train_documents(self) -> list[Document]:
        """Documents to learn from, a share of them strung together to long ones."""
        config, alone = self.config, self.documents[self._apart :]
        if not alone:
            raise RequestError("data", "gives a single text, and one must be kept to measure with; give more")
        return join_documents(alone, config.long_share, self.max_length, config.seed)

    @property
    def max_length(self) -> int:
        """Tokens of the longest text there can be."""
        return min(max(self.config.long_context, self.config.context), self.source.config.context)
