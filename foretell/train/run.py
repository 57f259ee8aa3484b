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

from .batches import Batches
from .block import BlockMethod
from .capture import Capture
from .checkpoint import FILE as CHECKPOINT
from .checkpoint import TrainingState, load_checkpoint
from .corpus import Corpus
from .cost_estimate import Forecast, forecast
from .distill import DistillMethod
from .eagle import EagleMethod
from .init_head import DRAFT_VOCAB, DRAFTED, MARKOV_RANK, OPTIMIZED, RATES, head_config, new_head, opened_head, shaped
from .job import Reporter, TrainJob
from .losses import DSPARK, LK, Mix
from .measure import Bench, drafter_name
from .medusa import MedusaMethod
from .model_files import check_writable
from .objective import Method
from .optimizer import Optimizer
from .settings import seconds
from .speculative_streaming import StreamingMethod, perplexity
from .token_dataset import FILE as ANSWERS
from .token_dataset import Document, coverage, data_hash, draft_vocabulary
from .trainer import Limits, Trainer, estimate

MIXES = {"lk": LK, "kl": Mix(kl=1.0), "tv": Mix(tv=1.0), "ce": Mix(ce=1.0), "dspark": DSPARK}
BATCH = {"cuda": 16_384, "cpu": 2048}
BUDGET = 600.0
MARGIN = 16  # positions beyond a text that guesses reach
RECORD, CANDIDATE = "run.json", "candidate"
MEASURED = 32  # prompts of those kept apart that go through the engine
ESTIMATED = 256  # texts of those kept apart that are looked at in a moment


class Run:
    """Everything a run is made of, made when it is needed."""

    def __init__(self, order: TrainJob, reporter: Reporter) -> None:
        self.order, self.config, self.reporter = order, order.config, reporter
        self.shape = shaped(order.kind, order.config)
        floats = EngineConfig(model=order.target, device=order.config.device, quantization="none")
        self.opened: ModelSource = open_model(order.target, floats, reporter.say)
        self.corpus = Corpus(order, self.opened, lambda: self.target, reporter)

    @cached_property
    def target(self) -> Decoder:
        """In floats, and not packed away: heads borrow from it, and it is run over whole texts."""
        return self.opened.load()

    @property
    def device(self) -> torch.device:
        return self.opened.device

    @property
    def drafted(self) -> int:
        return self.shape.draft_tokens or DRAFTED[self.order.kind]

    @cached_property
    def method(self) -> Method:
        """The drafter in training."""
        kind, config, vocab = self.order.kind, self.config, self.opened.config.vocab
        size = min(config.draft_vocab or DRAFT_VOCAB, vocab)
        ids = draft_vocabulary(self.corpus.training, size, vocab)
        said = head_config(kind, self.opened.config, self.shape, size, self.order.target)
        context = self.corpus.longest + MARGIN
        if config.init is None:
            head: Any = new_head(said, ids, self.target, config.seed, context)
        else:
            head = opened_head(config.init, said, ids if config.draft_vocab else None, self.target, context)
        share = coverage(self.corpus.held_out, head.draft_ids.tolist())
        self.reporter.say(f"{len(head.draft_ids)} tokens can be guessed: {share:.1%} of what the target says")
        mix, capture = MIXES[config.loss], Capture(self.target, said.hidden_layers, context)
        if kind == "eagle":
            return EagleMethod(head, capture, self.drafted, mix)
        if kind == "block":
            return BlockMethod(head, capture, mix)
        if kind == "medusa":
            return MedusaMethod(head, capture, mix)
        if kind == "streaming":
            check_writable(self.opened)
            return StreamingMethod(self.target, head, capture, self.opened, mix)
        return DistillMethod(head, capture, self.drafted, mix)

    @cached_property
    def trainer(self) -> Trainer:
        """The loop, where it stands."""
        config, order = self.config, self.order
        tokens = config.batch_tokens or BATCH[self.device.type]
        batches = Batches(self.corpus.training, tokens, config.seed, self.device)
        kind = config.optimizer or OPTIMIZED[order.kind]
        rate = config.learning_rate or RATES[kind][order.kind]
        optimizer = Optimizer(self.method.trained(), rate, config.warmup, config.clip, kind == "muon")
        standing = TrainingState(
            settings=self.settings,
            data=data_hash(self.corpus.training),
            target_hash=self.corpus.target_fingerprint,
        )
        capture = Capture(self.target, self.method.taps, self.corpus.longest + MARGIN)
        trainer = Trainer(self.method, capture, batches, optimizer, self._limits, order.out, standing)
        if order.resume and not self._only_answers:
            found, tensors = load_checkpoint(order.out)
            check_same(found, standing)
            trainer.standing = found
            trainer.load(tensors)
        return trainer

    @property
    def _only_answers(self) -> bool:
        """Whether a run was stopped while answers were written, before its first step."""
        out = self.order.out
        return (out / ANSWERS).is_file() and not (out / CHECKPOINT).is_file()

    @property
    def settings(self) -> dict[str, Any]:
        """What makes a run this one; how long it takes and where it is watched does not."""
        given = asdict(self.config)
        for name in ("piece", "check_every", "save_every", "certify", "answers", "device"):
            given.pop(name)
        if given["markov_rank"] is None:  # records have always said it
            given["markov_rank"] = MARKOV_RANK
        return {"kind": self.order.kind, "target": self.order.target, **given}

    @property
    def _limits(self) -> Limits:
        config = self.config
        budget = None if config.steps is not None else seconds(config.budget, "budget") if config.budget else BUDGET
        piece = None if config.piece is None else seconds(config.piece, "piece")
        check = None if config.check_every is None else seconds(config.check_every, "check_every")
        return Limits(config.steps, budget, piece, seconds(config.save_every, "save_every"), check)

    def forecast(self) -> Forecast:
        """What it will take, from one step that is not kept."""
        return forecast(self.trainer, self.order.out, self.corpus.part)

    def train(self) -> bool:
        """Go on to the end of this piece; True where the run is done and its drafter written."""
        self.order.out.mkdir(parents=True, exist_ok=True)
        done = self.trainer.run(self.keep, self.reporter.shown)
        self.keep()
        self.trainer.save()  # with the best so far: a resumed run replaces the drafter only by a better one
        self._record(done)
        return done

    def keep(self) -> None:
        """Measure what is there now, and write it where it is the best yet."""
        trainer, order = self.trainer, self.order
        quick = Batches(self.corpus.choosing[:ESTIMATED], trainer.batches.tokens, 0, self.device)
        accepted, accuracy = estimate(self.method, trainer.capture, quick, self.config.seed)
        said = {"held_out": round(accepted, 4)}
        self.method.write(order.out / CANDIDATE, accuracy)
        if self.config.measure:
            folder = order.out / CANDIDATE
            bench = self.bench(self.corpus.choosing, folder)
            accepted = bench.worth(drafter_name(order.kind, folder)).accepted
            said["engine"] = round(accepted, 4)
        if trainer.standing.curve:
            trainer.standing.curve[-1] |= said
        if accepted >= trainer.standing.best:
            trainer.standing.best = accepted
            move_files(order.out / CANDIDATE, order.out)
        shutil.rmtree(order.out / CANDIDATE)
        self.reporter.say(f"step {trainer.standing.step}: {accepted:.3f} tokens a step on texts kept apart")

    def _record(self, done: bool) -> None:
        """What was done, with what, and how it went."""
        standing = self.trainer.standing
        parameters = sum(each.numel() for each in self.method.trained())
        said = {
            "foretell": VERSION,
            "torch": torch.__version__,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "done": done,
            "parameters": parameters,
            "documents": len(self.corpus.training),
            "document_tokens": int(sum(len(each.tokens) for each in self.corpus.training)),
            "learnt_tokens": int(sum(each.learnt for each in self.corpus.training)),
            **asdict(standing),
        }
        if (found := self.perplexities()) is not None:
            said["perplexity"] = {"before": found[0], "after": found[1]}
            self.reporter.say(f"perplexity on texts kept apart: {found[0]:.3f} before, {found[1]:.3f} after")
        (self.order.out / RECORD).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    def perplexities(self) -> tuple[float, float] | None:
        """Of the target before and after, on texts kept apart, where the target itself was tuned."""
        method, trainer = self.method, self.trainer
        if not isinstance(method, StreamingMethod):
            return None
        apart = Batches(self.corpus.held_out[:ESTIMATED], trainer.batches.tokens, 0, self.device)
        capture = trainer.capture
        return perplexity(self.target, capture, apart), perplexity(method.tuned, capture, apart)

    def bench(self, held_out: Sequence[Document], tuned: Path | None = None) -> Bench:
        """Return the engine and held-out prompts to measure with; `tuned` is the folder of a target that was tuned."""
        prompts = [each.opening for each in held_out][:MEASURED]
        target = str(tuned or self.order.out) if self.order.kind == "streaming" else self.order.target
        return Bench(target, prompts, self.drafted, self.config.device)

    @property
    def drafter(self) -> str:
        """How `--drafter` names what this run writes."""
        return drafter_name(self.order.kind, self.order.out)


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
