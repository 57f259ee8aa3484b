"""A training run: prompts, answers, hidden states, steps, evaluation, files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
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
BATCH_TOKENS = {"cuda": 16_384, "cpu": 2048}
DEFAULT_BUDGET = 600.0  # seconds
DRAFT_MARGIN = 16  # positions past the end of a document that drafts reach
RUN_FILE = "run.json"
CANDIDATE_FOLDER = "candidate"  # a checkpoint under evaluation
ENGINE_EVAL_PROMPTS = 32  # held-out prompts of an evaluation in the engine
ESTIMATE_DOCUMENTS = 256  # held-out documents of an estimate


class TrainingRun:
    """One run and its parts, each built on first use."""

    def __init__(self, job: TrainJob, reporter: Reporter) -> None:
        self.job, self.config, self.reporter = job, job.config, reporter
        self.shape = with_head_shape(job.kind, job.config)
        engine_config = EngineConfig(model=job.target, device=job.config.device, quantization="none")
        self.source: ModelSource = open_model(job.target, engine_config, reporter.log)
        self.corpus = Corpus(job, self.source, lambda: self.target, reporter)

    @cached_property
    def target(self) -> Decoder:
        """Load the target unquantized and unpacked: heads share its weights, and it runs over whole documents."""
        return self.source.load()

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def draft_tokens(self) -> int:
        return self.shape.draft_tokens or DRAFT_TOKENS[self.job.kind]

    @cached_property
    def objective(self) -> Objective:
        """Build the drafter in training: new, or loaded from --init."""
        kind, config, vocab = self.job.kind, self.config, self.source.config.vocab
        size = min(config.draft_vocab or DRAFT_VOCAB, vocab)
        ids = draft_vocabulary(self.corpus.train_documents, size, vocab)
        shape = head_config(kind, self.source.config, self.shape, size, self.job.target)
        context = self.corpus.max_length + DRAFT_MARGIN
        if config.init is None:
            head: Any = new_head(shape, ids, self.target, config.seed, context)
        else:
            head = load_trained_head(config.init, shape, ids if config.draft_vocab else None, self.target, context)
        covered = coverage(self.corpus.held_out, head.draft_ids.tolist())
        self.reporter.log(f"draft vocabulary: {len(head.draft_ids)} tokens, {covered:.1%} of the answers' tokens")
        weights, capture = LOSS_WEIGHTS[config.loss], HiddenStateCapture(self.target, shape.hidden_layers, context)
        if kind == "eagle":
            return EagleObjective(head, capture, self.draft_tokens, weights)
        if kind == "block":
            return BlockObjective(head, capture, weights)
        if kind == "medusa":
            return MedusaObjective(head, capture, weights)
        if kind == "streaming":
            check_writable(self.source)
            return StreamingObjective(self.target, head, capture, self.source, weights)
        return DistillObjective(head, capture, self.draft_tokens, weights)

    @cached_property
    def trainer(self) -> Trainer:
        """Build the training loop, restored from the checkpoint with --resume."""
        config, job = self.config, self.job
        batch_tokens = config.batch_tokens or BATCH_TOKENS[self.device.type]
        batches = BatchLoader(self.corpus.train_documents, batch_tokens, config.seed, self.device)
        kind = config.optimizer or DEFAULT_OPTIMIZERS[job.kind]
        rate = config.learning_rate or LEARNING_RATES[kind][job.kind]
        optimizer = Optimizer(self.objective.parameters(), rate, config.warmup, config.clip, kind == "muon")
        state = TrainingState(
            settings=self.settings,
            data=data_hash(self.corpus.train_documents),
            target_hash=self.corpus.target_fingerprint,
        )
        capture = HiddenStateCapture(self.target, self.objective.hidden_layers, self.corpus.max_length + DRAFT_MARGIN)
        trainer = Trainer(self.objective, capture, batches, optimizer, self._limits, job.out, state)
        if job.resume and not self._has_only_answers:
            found, tensors = load_checkpoint(job.out)
            check_same(found, state)
            trainer.state = found
            trainer.load_checkpoint(tensors)
        return trainer

    @property
    def _has_only_answers(self) -> bool:
        """Return whether an earlier run stopped while generating answers, before its first step."""
        out = self.job.out
        return (out / ANSWERS_FILE).is_file() and not (out / CHECKPOINT_FILE).is_file()

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings a resumed run must share: those that change the result."""
        given = asdict(self.config)
        for name in ("piece", "check_every", "save_every", "certify", "answers", "device"):
            given.pop(name)
        if given["markov_rank"] is None:  # run.json has always had a number here
            given["markov_rank"] = MARKOV_RANK
        return {"kind": self.job.kind, "target": self.job.target, **given}

    @property
    def _limits(self) -> TrainingLimits:
        config = self.config
        budget = None
        if config.steps is None:
            budget = parse_seconds(config.budget, "budget") if config.budget else DEFAULT_BUDGET
        return TrainingLimits(
            steps=config.steps,
            budget=budget,
            piece=None if config.piece is None else parse_seconds(config.piece, "piece"),
            save_every=parse_seconds(config.save_every, "save_every"),
            check_every=None if config.check_every is None else parse_seconds(config.check_every, "check_every"),
        )

    def estimate_cost(self) -> CostEstimate:
        """Estimate the cost of the run from one discarded step."""
        return estimate_cost(self.trainer, self.job.out, self.corpus.answered_fraction)

    def train(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until this part of the run ends; return True if the run is done and its drafter written.

        When `stop` returns True, the run ends with a checkpoint and without an evaluation.
        """
        self.job.out.mkdir(parents=True, exist_ok=True)
        done = self.trainer.run(self.evaluate_checkpoint, self.reporter.on_progress, stop)
        if stop() and not done:
            return False
        self.evaluate_checkpoint()
        self.trainer.save_checkpoint()  # with the best result: a resumed run replaces the drafter only by a better one
        self._write_record(done)
        return done

    def evaluate_checkpoint(self) -> None:
        """Evaluate the current weights and write the drafter if it is the best so far."""
        trainer, job = self.trainer, self.job
        documents = self.corpus.selection_documents[:ESTIMATE_DOCUMENTS]
        batches = BatchLoader(documents, trainer.batches.batch_tokens, 0, self.device)
        accepted, accuracy = estimate_acceptance(self.objective, trainer.capture, batches, self.config.seed)
        results = {"held_out": round(accepted, 4)}
        candidate = job.out / CANDIDATE_FOLDER
        self.objective.save(candidate, accuracy)
        if self.config.measure:
            evaluator = self.evaluator(self.corpus.selection_documents, candidate)
            accepted = evaluator.measure(drafter_name(job.kind, candidate)).accepted_per_step
            results["engine"] = round(accepted, 4)
        if trainer.state.curve:
            trainer.state.curve[-1] |= results
        if accepted >= trainer.state.best:
            trainer.state.best = accepted
            move_files(candidate, job.out)
        shutil.rmtree(candidate)
        self.reporter.log(f"step {trainer.state.step}: {accepted:.3f} tokens per step on held-out prompts")

    def _write_record(self, done: bool) -> None:
        """Write run.json: settings, data, training curve and results."""
        documents = self.corpus.train_documents
        record = {
            "foretell": VERSION,
            "torch": torch.__version__,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "done": done,
            "parameters": sum(each.numel() for each in self.objective.parameters()),
            "documents": len(documents),
            "document_tokens": int(sum(len(each.tokens) for each in documents)),
            "learnt_tokens": int(sum(each.num_loss_tokens for each in documents)),
            **asdict(self.trainer.state),
        }
        if (found := self.perplexities()) is not None:
            record["perplexity"] = {"before": found[0], "after": found[1]}
            self.reporter.log(f"perplexity on held-out documents: {found[0]:.3f} before, {found[1]:.3f} after")
        (self.job.out / RUN_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def perplexities(self) -> tuple[float, float] | None:
        """Return the held-out perplexity of a tuned target before and after; None if the target was not tuned."""
        objective, trainer = self.objective, self.trainer
        if not isinstance(objective, StreamingObjective):
            return None
        documents = self.corpus.held_out[:ESTIMATE_DOCUMENTS]
        batches = BatchLoader(documents, trainer.batches.batch_tokens, 0, self.device)
        capture = trainer.capture
        return perplexity(self.target, capture, batches), perplexity(objective.tuned, capture, batches)

    def evaluator(self, held_out: Sequence[Document], tuned: Path | None = None) -> DrafterEvaluator:
        """Return an evaluator with held-out prompts; `tuned` is the folder of a tuned target."""
        prompts = [each.eval_prompt for each in held_out][:ENGINE_EVAL_PROMPTS]
        target = str(tuned or self.job.out) if self.job.kind == "streaming" else self.job.target
        return DrafterEvaluator(target, prompts, self.draft_tokens, self.config.device)

    @property
    def drafter(self) -> str:
        """Return the value of `--drafter` for the drafter of this run."""
        return drafter_name(self.job.kind, self.job.out)


def move_files(source: Path, target: Path) -> None:
    """Move all files of a folder into another, replacing those of the same name."""
    for each in sorted(source.rglob("*")):
        if each.is_file():
            (target / each.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            os.replace(each, target / each.relative_to(source))


def check_same(found: TrainingState, current: TrainingState) -> None:
    """Refuse to resume with other settings, another target or other data."""
    for name, value in current.settings.items():
        if (before := found.settings.get(name)) != value:
            raise RequestError(name, f"was {before!r} when this run began; --resume needs the same settings")
    if found.target_hash and found.target_hash != current.target_hash:
        raise RequestError("target", "has other files than when this run began; use the same target, or another --out")
    if found.data != current.data:
        raise RequestError("data", "differs from what this run began with; leave --resume out to start a new run")
