"""Training corpus of a run: the target's answers to the prompts, some of them held out for evaluation."""

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

PROBE_PROMPTS = {"cuda": 512, "cpu": 16}  # prompts answered first, to estimate the time for all


class Corpus:
    """Documents of a run, generated or loaded on first use."""

    def __init__(self, job: TrainJob, source: ModelSource, target: Callable[[], Decoder], reporter: Reporter) -> None:
        self.job, self.config, self.source, self.target = job, job.config, source, target
        self.reporter = reporter
        self.answered_fraction = 1.0  # of the prompts; less than 1 in a dry run

    @cached_property
    def documents(self) -> list[Document]:
        """Return all documents, shuffled by the seed: those of --answers if given, else the target's answers."""
        file = self.config.answers
        found = self._generated() if file is None else self._loaded(Path(file))
        usable = [each for each in found if each.num_loss_tokens >= MIN_ANSWER_TOKENS]
        if not usable:
            raise RequestError("data", f"gave no answer of {MIN_ANSWER_TOKENS} tokens or more; use other prompts")
        random.Random(self.config.seed).shuffle(usable)
        return usable[: self.config.prompts]

    @cached_property
    def target_fingerprint(self) -> str:
        """Return the hash of the target's files."""
        return target_fingerprint(self.source.checkpoint.path)

    def _loaded(self, path: Path) -> list[Document]:
        """Load the file of --answers, with a warning if another target generated it."""
        documents, fingerprint = load_documents(path), load_fingerprint(path)
        if fingerprint is not None and fingerprint.get("target") != self.target_fingerprint:
            self.reporter.log(f"warning: another target generated the answers in {path}")
        return documents

    def _generated(self) -> list[Document]:
        """Answer a few prompts, report the time for all of them, and answer the rest unless this is a dry run."""
        assert self.job.data is not None, "without --answers a run has data"
        prompts = load_prompts(self.job.data)
        random.Random(self.config.seed).shuffle(prompts)
        prompts = prompts[: self.config.prompts]
        self.job.out.mkdir(parents=True, exist_ok=True)
        began, few = time.monotonic(), prompts[: PROBE_PROMPTS[self.source.device.type]]
        fraction = len(few) / len(prompts)
        found = self._regenerate(few, reports=fraction == 1 or self.job.dry_run)
        if fraction == 1:
            return found
        if any(not prompt.answer_tokens and not prompt.is_document for prompt in prompts):
            remaining = (time.monotonic() - began) * (1 / fraction - 1)
            mib = len(prompts) * self.config.context * 2 / 2**20
            time_and_disk = f"about {format_duration(remaining)}, at most {mib:.0f} MiB of disk"
            self.reporter.log(f"{len(prompts)} prompts to answer: {time_and_disk}")
        if self.job.dry_run:
            self.answered_fraction = fraction
            return found
        return self._regenerate(prompts)

    def _regenerate(self, prompts: list[TrainPrompt], reports: bool = True) -> list[Document]:
        config = self.config
        settings = RegenerateSettings(
            max_tokens=config.max_tokens,
            context=config.context,
            greedy=config.greedy,
            temperature=config.temperature,
            seed=config.seed,
        )
        fingerprint = answers_fingerprint(self.target_fingerprint, settings)
        return regenerate(
            prompts,
            self.source,
            self.target,
            lambda: LLM(self.job.target, device=config.device, quiet=True),
            settings,
            AnswerCache(self.job.out, fingerprint, self.reporter.log, reports),
            self.reporter.on_answer,
        )

    @property
    def _num_held_out(self) -> int:
        """Return the number of held-out documents: at most a tenth, so that small data sets can train."""
        return min(self.config.held_out, max(1, len(self.documents) // 10))

    @cached_property
    def held_out(self) -> list[Document]:
        return self.documents[: self._num_held_out]

    @property
    def selection_documents(self) -> list[Document]:
        """Return the half of the held-out documents that checkpoints are selected on."""
        return self.held_out[::2]

    @property
    def report_documents(self) -> list[Document]:
        """Return the other half, for unbiased final figures; the same document if there is only one."""
        return self.held_out[1::2] or self.held_out

    @cached_property
    def train_documents(self) -> list[Document]:
        """Return the documents to train on, a fraction of them concatenated to long ones."""
        config, documents = self.config, self.documents[self._num_held_out :]
        if not documents:
            raise RequestError("data", "gave a single document, which is held out for evaluation; give more prompts")
        return join_documents(documents, config.long_share, self.max_length, config.seed)

    @property
    def max_length(self) -> int:
        """Return the tokens of the longest possible document."""
        return min(max(self.config.long_context, self.config.context), self.source.config.context)
