"""Whether a draft model will work for a target and how, by their configs and tokenizers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from foretell.draft.cross_tokenizer.vocab_map import VocabMap, VocabSide, first_difference, is_readable, keeps_text
from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub import Checkpoint, huggingface, open_checkpoint, resolve
from foretell.hub.catalog import BUILTINS
from foretell.hub.checkpoint import CONFIG, read_generation, read_json, read_tokenizer_files
from foretell.hub.resolve import REPO, explain_folder_error
from foretell.models.config import ModelConfig
from foretell.models.hf_config import read_config
from foretell.tokenizer import Tokenizer

Kind = Literal["same", "tokens", "strings", "refused"]
LARGE = 0.5  # of the target's weights; a larger draft seldom pays
REMEDY = "take a draft of the target's family"


class Described(Protocol):
    """A model that was looked at; its weights need not be there."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class Model:
    """What a model's small files say."""

    config: ModelConfig
    tokenizer: Tokenizer


@dataclass(frozen=True)
class DraftCompat:
    """How a draft can guess for a target, or why it cannot."""

    kind: Kind
    words: str
    notes: tuple[str, ...] = ()
    parameters: tuple[int, int] | None = None  # of the target and of the draft
    vocabularies: VocabMap | None = field(default=None, repr=False, compare=False)  # to translate with

    @property
    def works(self) -> bool:
        return self.kind != "refused"

    @property
    def weight_ratio(self) -> float | None:
        """The draft's bytes of weights to the target's, at equal precision: what a guess costs of a step."""
        return None if self.parameters is None else self.parameters[1] / self.parameters[0]

    @property
    def agreement(self) -> float | None:
        """The share of the target's tokens of ordinary text that the draft cuts the same."""
        shared = self.vocabularies
        return 1.0 if self.kind == "same" else None if shared is None else shared.agreement


def judge_pair(target: Described, draft: Described) -> DraftCompat:
    """Compare the tokens themselves: sizes say little, for vocabularies are padded."""
    counts = (parameters(target.config), parameters(draft.config))
    notes = tuple(cautions(target, draft, counts[1] / counts[0]))
    place = first_difference(target.tokenizer, draft.tokenizer)
    if place is None and target.tokenizer.vocab_size <= draft.config.vocab:
        return DraftCompat("same", "both have the same tokenizer", notes, counts)
    for name, model in (("target", target), ("draft", draft)):
        if problem := unfit(model.tokenizer):
            return DraftCompat("refused", f"the tokenizers differ, and the {name}'s {problem}; {REMEDY}", notes, counts)
    vocabularies = VocabMap.of(*(VocabSide(model.tokenizer, model.config.vocab) for model in (target, draft)))
    words = f"the tokenizers differ{where(place, target, draft)}; {vocabularies.in_words}"
    return DraftCompat(vocabularies.way, words, notes, counts, vocabularies)


def unfit(tokenizer: Tokenizer) -> str | None:
    """Why a tokenizer's text cannot be told in another's tokens."""
    if not is_readable(tokenizer):
        return "tokens cannot be read one by one"
    return None if keeps_text(tokenizer) else "tokens do not keep text as it was written"


def where(place: int | None, target: Described, draft: Described) -> str:
    """The first difference, for people to look at."""
    if place is None:
        return f": the draft's has {draft.config.vocab} tokens and the target's {target.tokenizer.vocab_size}"
    return f", first at token {place}: {target.tokenizer.piece(place)!r} and {draft.tokenizer.piece(place)!r}"


def cautions(target: Described, draft: Described, ratio: float) -> Iterator[str]:
    """What to know beforehand of a pair that works."""
    pays = ", so it cannot pay" if ratio >= 1 else " and will seldom pay; a tenth is usual" if ratio >= LARGE else ""
    yield f"the draft has {ratio:.0%} of the target's weights{pays}"
    if draft.config.context < target.config.context:
        context = f"{draft.config.context:,} tokens and the target {target.config.context:,}"
        yield f"the draft takes {context}; texts go on without drafts from there"
    if draft.config.vocab != target.config.vocab and draft.tokenizer.vocab_size == target.tokenizer.vocab_size:
        yield f"vocabularies of {target.config.vocab} and {draft.config.vocab} tokens differ by padding alone"


def parameters(config: ModelConfig) -> int:
    """How many weights a model has."""
    width, heads = config.width, (config.heads + 2 * config.kv_heads) * config.head_dim
    attention = width * heads + config.heads * config.head_dim * width
    biases = heads * config.qkv_bias + width * config.out_bias + (2 * config.ffn + width) * config.mlp_bias
    norms = width * (4 if config.sandwich_norms else 2) + 2 * config.head_dim * config.qk_norm
    layer = attention + 3 * width * config.ffn + biases + norms
    return config.layers * layer + width + config.vocab * width * (1 if config.tied else 2)


def check_pair(target: str, draft: str, say: Callable[[str], None]) -> DraftCompat:
    """Judge two models by name; one that is not served is a pair that does not work."""
    models: list[Model] = []
    for name in (target, draft):
        try:
            models.append(look_up(name, say))
        except UnsupportedModelError as error:
            return DraftCompat("refused", f"{name}: {error}")
    return judge_pair(*models)


def look_up(name: str, say: Callable[[str], None]) -> Model:
    """What a model is made of. Of a folder or a Hugging Face id only the small files are needed and fetched."""
    checkpoint = light_checkpoint(name, say)
    config = read_config(checkpoint)
    if checkpoint.kind == "gguf":
        return Model(config, Tokenizer.from_gguf(checkpoint.config))
    return Model(config, Tokenizer.from_files(checkpoint.tokenizer_files))


def light_checkpoint(name: str, say: Callable[[str], None]) -> Checkpoint:
    """A checkpoint for its config and its tokenizer; a GGUF file is whole or nothing."""
    path = Path(os.path.expanduser(name))
    if name not in BUILTINS and os.path.isdir(path):
        return open_small_files(path)
    if name in BUILTINS or os.path.exists(path) or not REPO.fullmatch(name) or name.endswith(".gguf"):
        return open_checkpoint(resolve(name, say))
    folder = huggingface_small_files(name)
    try:
        return open_small_files(folder)
    except ModelError as error:
        raise explain_folder_error(name, error) from error


def open_small_files(folder: Path) -> Checkpoint:
    """A folder that may lack its weights."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: has no {CONFIG}, which says what a model is made of")
    config, generation = read_json(folder / CONFIG), read_generation(folder)
    return Checkpoint(folder, "folder", config, generation, read_tokenizer_files(folder), {})


def huggingface_small_files(repo: str) -> Path:
    """The folder of a repository without its weights; fetched if need be."""
    small = [pattern for pattern in huggingface.WANTED if not pattern.endswith(".safetensors")]
    return huggingface.snapshot(repo, patterns=small)
