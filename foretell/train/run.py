"""One training run from a command: data, answers, states, steps, a measurement, files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foretell.build.model_source import ModelSource, open_model
from foretell.config import EngineConfig
from foretell.errors import RequestError
from foretell.models.decoder import Decoder
from foretell.version import VERSION

from .block import BlockObjective
from .capture import HiddenStateCapture
from .corpus import Corpus
from .cost_estimate import CostEstimate, estimate_cost
from .eagle import EagleObjective
from .export import check_writable
from .init_head import (
    DEFAULT_OPTIMIZERS,
    DRAFT_TOKENS,
    DRAFT_VOCAB,
    LEARNING_RATES,
    MARKOV_RANK,
    head_config,
    load_trained_head,
    new_head,
    with_head_shape,
)
from .losses import DSPARK, LK, LossWeights
from .measure import DrafterEvaluator, drafter_name
from .medusa import MedusaObjective, StreamingObjective, perplexity
from .objective import DistillObjective, Objective
from .optimizer import Optimizer
from .settings import Reporter, TrainJob, parse_seconds
from .token_dataset import ANSWERS_FILE, BatchLoader, Document, coverage, data_hash, draft_vocabulary
from .trainer import CHECKPOINT_FILE, Trainer, TrainingLimits, TrainingState, estimate_acceptance, load_checkpoint

LOSS_WEIGHTS = {
    "lk": LK,
    "kl": LossWeights(kl=1.0),
    "tv": LossWeights(tv=1.0),
    "ce": LossWeights(ce=1.0),
    "dspark": DSPARK,
}
BATCH = {"cuda": 16_384, "cpu": 2048}
BUDGET = 600.0
MARGIN = 16  # positions beyond a text that guesses reach
RUN_FILE, CANDIDATE = "run.json", "candidate"
MEASURED = 32  # prompts of those kept apart that go through the engine
ESTIMATED = 256  # texts of those kept apart that are looked at in a moment


class TrainingRun:
    """Everything a run is made of, made when it is needed."""

    def __init__(self, order: TrainJob, reporter: Reporter) -> None:
        self.job, self.config, self.reporter = order, order.config, reporter
        self.shape = with_head_shape(order.kind, order.config)
        floats = EngineConfig(model=order.target, device=order.config.device, quantization="none")
        self.source: ModelSource = open_model(order.target, floats, reporter.log)
        self.corpus = Corpus(order, self.source, lambda: self.target, reporter)

    @cached_property
    def target(self) -> Decoder:
        """In floats, and not packed away: heads borrow from it, and it is run over whole texts."""
        return self.source.load()

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def draft_tokens(self) -> int:
        return self.shape.draft_tokens or DRAFT_TOKENS[self.job.kind]

    @cached_property
    def objective(self) -> Objective:
        """The drafter in training."""
        kind, config, vocab = self.job.kind, self.config, self.source.config.vocab
        size = min(config.draft_vocab or DRAFT_VOCAB, vocab)
        ids = draft_vocabulary(self.corpus.train_documents, size, vocab)
        said = head_config(kind, self.source.config, self.shape, size, self.job.target)
        context = self.corpus.max_length + MARGIN
        if config.init is None:
            head: Any = new_head(said, ids, self.target, config.seed, context)
        else:
            head = load_trained_head(config.init, said, ids if config.draft_vocab else None, self.target, context)
        share = coverage(self.corpus.held_out, head.draft_ids.tolist())
        self.reporter.log(f"{len(head.draft_ids)} tokens can be guessed: {share:.1%} of what the target says")
        mix, capture = LOSS_WEIGHTS[config.loss], HiddenStateCapture(self.target, said.taps, context)
        if kind == "eagle":
            return EagleObjective(head, capture, self.draft_tokens, mix)
        if kind == "block":
            return BlockObjective(head, capture, mix)
        if kind == "medusa":
            return MedusaObjective(head, capture, mix)
        if kind == "streaming":
            check_writable(self.source)
            return StreamingObjective(self.target, head, capture, self.source, mix)
        return DistillObjective(head, capture, self.draft_tokens, mix)

    @cached_property
    def trainer(self) -> Trainer:
        """The loop, where it stands."""
        config, order = self.config, self.job
        tokens = config.batch_tokens or BATCH[self.device.type]
        batches = BatchLoader(self.corpus.train_documents, tokens, config.seed, self.device)
        kind = config.optimizer or DEFAULT_OPTIMIZERS[order.kind]
        rate = config.learning_rate or LEARNING_RATES[kind][order.kind]
        optimizer = Optimizer(self.objective.parameters(), rate, config.warmup, config.clip, kind == "muon")
        standing = TrainingState(
            settings=self.settings,
            data=data_hash(self.corpus.train_documents),
            target_hash=self.corpus.target_fingerprint,
        )
        capture = HiddenStateCapture(self.target, self.objective.hidden_layers, self.corpus.max_length + MARGIN)
        trainer = Trainer(self.objective, capture, batches, optimizer, self._limits, order.out, standing)
        if order.resume and not self._only_answers:
            found, tensors = load_checkpoint(order.out)
            check_same(found, standing)
            trainer.state = found
            trainer.load_checkpoint(tensors)
        return trainer

    @property
    def _only_answers(self) -> bool:
        """Whether a run was stopped while answers were written, before its first step."""
        out = self.job.out
        return (out / ANSWERS_FILE).is_file() and not (out / CHECKPOINT_FILE).is_file()

    @property
    def settings(self) -> dict[str, Any]:
        """What makes a run this one; how long it takes and where it is watched does not."""
        given = asdict(self.config)
        for name in ("piece", "check_every", "save_every", "certify", "answers", "device"):
            given.pop(name)
        if given["markov_rank"] is None:  # records have always said it
            given["markov_rank"] = MARKOV_RANK
        return {"kind": self.job.kind, "target": self.job.target, **given}

    @property
    def _limits(self) -> TrainingLimits:
        config = self.config
        budget = (
            None if config.steps is not None else parse_seconds(config.budget, "budget") if config.budget else BUDGET
        )
        piece = None if config.piece is None else parse_seconds(config.piece, "piece")
        check = None if config.check_every is None else parse_seconds(config.check_every, "check_every")
        return TrainingLimits(config.steps, budget, piece, parse_seconds(config.save_every, "save_every"), check)

    def estimate_cost(self) -> CostEstimate:
        """What it will take, from one step that is not kept."""
        return estimate_cost(self.trainer, self.job.out, self.corpus.answered_fraction)

    def train(self) -> bool:
        """Go on to the end of this piece; True where the run is done and its drafter written."""
        self.job.out.mkdir(parents=True, exist_ok=True)
        done = self.trainer.run(self.evaluate_checkpoint, self.reporter.on_progress)
        self.evaluate_checkpoint()
        self.trainer.save_checkpoint()  # with the best so far: a resumed run replaces the drafter only by a better one
        self._record(done)
        return done

    def evaluate_checkpoint(self) -> None:
        """Measure what is there now, and write it where it is the best yet."""
        trainer, order = self.trainer, self.job
        quick = BatchLoader(self.corpus.selection_documents[:ESTIMATED], trainer.batches.batch_tokens, 0, self.device)
        accepted, accuracy = estimate_acceptance(self.objective, trainer.capture, quick, self.config.seed)
        said = {"held_out": round(accepted, 4)}
        self.objective.save(order.out / CANDIDATE, accuracy)
        if self.config.measure:
            folder = order.out / CANDIDATE
            bench = self.evaluator(self.corpus.selection_documents, folder)
            accepted = bench.measure(drafter_name(order.kind, folder)).accepted_per_step
            said["engine"] = round(accepted, 4)
        if trainer.state.curve:
            trainer.state.curve[-1] |= said
        if accepted >= trainer.state.best:
            trainer.state.best = accepted
            move_files(order.out / CANDIDATE, order.out)
        shutil.rmtree(order.out / CANDIDATE)
        self.reporter.log(f"step {trainer.state.step}: {accepted:.3f} tokens a step on texts kept apart")

    def _record(self, done: bool) -> None:
        """What was done, with what, and how it went."""
        standing = self.trainer.state
        parameters = sum(each.numel() for each in self.objective.parameters())
        said = {
            "foretell": VERSION,
            "torch": torch.__version__,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "done": done,
            "parameters": parameters,
            "documents": len(self.corpus.train_documents),
            "document_tokens": int(sum(len(each.tokens) for each in self.corpus.train_documents)),
            "learnt_tokens": int(sum(each.num_loss_tokens for each in self.corpus.train_documents)),
            **asdict(standing),
        }
        if (found := self.perplexities()) is not None:
            said["perplexity"] = {"before": found[0], "after": found[1]}
            self.reporter.log(f"perplexity on texts kept apart: {found[0]:.3f} before, {found[1]:.3f} after")
        (self.job.out / RUN_FILE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    def perplexities(self) -> tuple[float, float] | None:
        """Of the target before and after, on texts kept apart, where the target itself was tuned."""
        method, trainer = self.objective, self.trainer
        if not isinstance(method, StreamingObjective):
            return None
        apart = BatchLoader(self.corpus.held_out[:ESTIMATED], trainer.batches.batch_tokens, 0, self.device)
        capture = trainer.capture
        return perplexity(self.target, capture, apart), perplexity(method.tuned, capture, apart)

    def evaluator(self, held_out: Sequence[Document], tuned: Path | None = None) -> DrafterEvaluator:
        """Return the engine and held-out prompts to measure with; `tuned` is the folder of a target that was tuned."""
        prompts = [each.eval_prompt for each in held_out][:MEASURED]
        target = str(tuned or self.job.out) if self.job.kind == "streaming" else self.job.target
        return DrafterEvaluator(target, prompts, self.draft_tokens, self.config.device)

    @property
    def drafter(self) -> str:
        """How `--drafter` names what this run writes."""
        return drafter_name(self.job.kind, self.job.out)


def move_files(source: Path, target: Path) -> None:
    """Each file in the place of the one before it."""
    for each in sorted(source.rglob("*")):
        if each.is_file():
            (target / each.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            os.replace(each, target / each.relative_to(source))


def check_same(found: TrainingState, mine: TrainingState) -> None:
    """Refuse to go on with other settings or other data: what came of it would be neither run."""
    for name, value in mine.settings.items():
        if (before := found.settings.get(name)) != value:
            raise RequestError(name, f"was {before!r} when this run began; --resume goes on as it was")
    if found.target_hash and found.target_hash != mine.target_hash:
        raise RequestError("target", "has other files than when this run began; give the same target, or another --out")
    if found.data != mine.data:
        raise RequestError("data", "is not what this run began with; leave --resume out to begin anew")
