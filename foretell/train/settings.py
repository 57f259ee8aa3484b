"""Training settings and the job of one run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import RequestError
from foretell.options import option, strict

KINDS = ("medusa", "eagle", "block", "distill", "streaming")
OPTIMIZERS = ("muon", "adamw")
LOSSES = ("lk", "kl", "tv", "ce", "dspark")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}


@strict
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run. None means the default of the --init head, the kind, the target or the device.

    Field names are part of the checkpoint format and of run.json.
    """

    init: str | None = option(None, "continue from a trained drafter of the same kind; its shape is kept", common=True)
    budget: str | None = option(
        None, "training time, such as 90s, 10m or 2h (default: 10m, unless --steps is given)", common=True
    )
    steps: int | None = option(None, "number of training steps, instead of --budget", common=True)
    piece: str | None = option(None, "stop after this long; continue with --resume")
    seed: int = option(0, "seed of initial weights, data order and sampling", common=True)
    prompts: int | None = option(None, "use at most this many prompts", common=True)
    max_tokens: int = option(256, "maximum tokens of an answer the target generates", common=True)
    temperature: float = option(0.7, "temperature of half of the sampled answers; the other half uses 1.0")
    greedy: float = option(0.5, "fraction of answers generated greedily instead of sampled")
    context: int = option(1024, "maximum tokens of a training document")
    long_share: float = option(0.05, "fraction of documents concatenated to long ones")
    long_context: int = option(3072, "maximum tokens of a concatenated document")
    batch_tokens: int | None = option(None, "tokens per step (default: 16384 on a GPU, 2048 on a CPU)")
    learning_rate: float | None = option(None, "peak learning rate (default: by kind)", common=True)
    warmup: int = option(100, "warm-up steps of the learning rate")
    clip: float = option(1.0, "maximum gradient norm")
    optimizer: str | None = option(None, "muon or adamw (default: by kind)", choices=OPTIMIZERS)
    loss: str = option("lk", "distillation loss; lk blends from KL to total variation", choices=LOSSES)
    layers: int | None = option(None, "layers of the drafter (eagle 1, block 2, distill 4, medusa 1)", common=True)
    draft_tokens: int | None = option(None, "draft tokens per step (eagle 5, block 7, medusa 3)", common=True)
    draft_vocab: int | None = option(None, "size of the draft vocabulary (default: 8192, or the target's if smaller)")
    markov_rank: int | None = option(None, "block: rank of the Markov head (default: 32); 0 disables it")
    taps: str | None = option(None, "target layers whose hidden states the head reads, such as 2,15,27")
    held_out: int = option(48, "prompts held out for evaluation")
    check_every: str | None = option(None, "interval of evaluations in the engine, such as 60s (default: at the end)")
    save_every: str = option("60s", "interval of checkpoints")
    device: str = option("auto", "device to train on: auto, cpu or cuda", common=True)
    answers: str | None = option(None, "use the answers of an earlier run (its answers.npz)")
    measure: bool = option(True, "select checkpoints by accepted tokens per step in the engine, not by an estimate")
    certify: bool = option(True, "certify the trained drafter as lossless at the end")

    def __post_init__(self) -> None:
        for name in ("budget", "piece", "check_every", "save_every"):
            if getattr(self, name) is not None:
                parse_seconds(getattr(self, name), name)
        for name in ("steps", "prompts", "max_tokens", "context", "batch_tokens", "layers", "draft_tokens", "held_out"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(name, f"must be 1 or more, not {value}")
        for name in ("greedy", "long_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(name, f"must be between 0 and 1, not {getattr(self, name)}")
        if self.loss not in LOSSES:
            raise RequestError("loss", f"must be one of {', '.join(LOSSES)}; not {self.loss!r}")
        if self.optimizer not in (None, *OPTIMIZERS):
            raise RequestError("optimizer", f"must be {' or '.join(OPTIMIZERS)}, not {self.optimizer!r}")
        if self.budget is not None and self.steps is not None:
            raise RequestError("steps", "cannot be combined with --budget; give one of them")

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        """Return the layers of --taps as numbers."""
        if self.taps is None:
            return None
        try:
            return tuple(int(each) for each in self.taps.split(","))
        except ValueError:
            raise RequestError("taps", f"must be layer numbers such as 2,15,27; not {self.taps!r}") from None


def parse_seconds(text: str, name: str) -> float:
    """Parse a duration such as 90s, 10m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None or float(found[1]) <= 0:
        raise RequestError(name, f"must be a duration such as 90s, 10m or 2h, not {text!r}")
    return float(found[1]) * UNIT_SECONDS[found[2]]


@dataclass(frozen=True)
class TrainingProgress:
    """Values of a progress line."""

    step: int
    fraction_done: float
    elapsed: float  # seconds
    loss: float
    accepted: float  # output tokens per step with teacher forcing
    tokens_per_second: float  # trained on


@dataclass(frozen=True)
class TrainJob:
    """A training run: drafter kind, target, prompts and output folder."""

    kind: str
    target: str
    data: str | None
    out: Path
    resume: bool = False
    dry_run: bool = False  # only estimate the cost
    config: TrainConfig = TrainConfig()


@dataclass(frozen=True)
class Reporter:
    """Callbacks for progress: log lines, answers generated (done, total), and training steps."""

    log: Callable[[str], None]
    on_answer: Callable[[int, int], None]
    on_progress: Callable[[TrainingProgress], None]
