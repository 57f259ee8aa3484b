"""How to train: frozen, checked, declared once."""

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
UNITS = {"s": 1, "m": 60, "h": 3600}


@strict
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. What is None is chosen by the head that is gone on with, the kind, the target and the device."""

    init: str | None = option(None, "a drafter of the same kind to start from, whose shape is kept")
    budget: str | None = option(None, "how long to train, as 90s, 10m or 2h (default: 10m, or by --steps)")
    steps: int | None = option(None, "how many steps to train instead")
    piece: str | None = option(None, "stop after this long, to be gone on with by --resume")
    seed: int = option(0, "decides weights, order and draws")
    prompts: int | None = option(None, "use at most this many prompts")
    max_tokens: int = option(256, "the longest answer the target writes")
    temperature: float = option(0.7, "what part of the answers is drawn with; the rest is greedy")
    greedy: float = option(0.5, "the share of answers that is greedy")
    context: int = option(1024, "tokens of a text that are trained on")
    long_share: float = option(0.05, "the share of texts that are strung together to long ones")
    long_context: int = option(3072, "tokens of such a string")
    batch_tokens: int | None = option(None, "tokens of a step (default: 16384 on a GPU, 2048 on a CPU)")
    learning_rate: float | None = option(None, "the highest (default: by the kind)")
    warmup: int = option(100, "steps until the learning rate is reached")
    clip: float = option(1.0, "the longest gradient")
    optimizer: str | None = option(None, "muon or adamw (default: by the kind)", choices=OPTIMIZERS)
    loss: str = option("lk", "what is made small", choices=LOSSES)
    layers: int | None = option(None, "layers of the draft (eagle 1, block 2, distill 4, medusa 1)")
    draft_tokens: int | None = option(None, "tokens guessed a step (eagle 5, block 7, medusa 3)")
    draft_vocab: int | None = option(None, "tokens the draft can guess (default: 8192, or all where there are fewer)")
    markov_rank: int | None = option(None, "block: the rank of the Markov head (default: 32); 0 is none")
    taps: str | None = option(None, "layers of the target whose states are read, as 2,15,27")
    held_out: int = option(48, "prompts that are kept apart to measure with")
    check_every: str | None = option(None, "how often to measure through the engine, as 60s (default: at the end)")
    save_every: str = option("60s", "how often to keep a checkpoint")
    device: str = option("auto", "where to train: auto, cpu or cuda")
    answers: str | None = option(None, "a file of answers that an earlier run wrote (answers.npz)")
    measure: bool = option(True, "choose between checkpoints by tokens a step through the engine, not by an estimate")
    certify: bool = option(True, "certify the result at the end")

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
            raise RequestError("loss", f"must be {', '.join(LOSSES)}; not {self.loss!r}")
        if self.optimizer not in (None, *OPTIMIZERS):
            raise RequestError("optimizer", f"must be {' or '.join(OPTIMIZERS)}, not {self.optimizer!r}")
        if self.budget is not None and self.steps is not None:
            raise RequestError("steps", "give a budget or steps, not both")

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        if self.taps is None:
            return None
        try:
            return tuple(int(each) for each in self.taps.split(","))
        except ValueError:
            raise RequestError("taps", f"must be numbers with commas, such as 2,15,27; not {self.taps!r}") from None


def parse_seconds(words: str, name: str) -> float:
    """Of 90s, 10m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", words.strip())
    if found is None or float(found[1]) <= 0:
        raise RequestError(name, f"must be such as 90s, 10m or 2h, not {words!r}")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class TrainingProgress:
    """What a progress line says."""

    step: int
    fraction_done: float  # of the run that is done
    elapsed: float
    loss: float
    accepted: float  # a step, were the text's own tokens always there
    tokens_per_second: float


@dataclass(frozen=True)
class TrainJob:
    """What is to be trained, for which target, from what, into which folder."""

    kind: str
    target: str
    data: str | None
    out: Path
    resume: bool = False
    dry_run: bool = False  # to say what it will take, and no more
    config: TrainConfig = TrainConfig()


@dataclass(frozen=True)
class Reporter:
    """Who is told what, while it goes on."""

    log: Callable[[str], None]
    on_answer: Callable[[int, int], None]
    on_progress: Callable[[TrainingProgress], None]
