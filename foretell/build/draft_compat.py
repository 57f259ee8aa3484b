"""Checks whether a draft model works for a target, by their configs and tokenizers alone."""

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
LARGE_DRAFT = 0.5  # of the target's weights; a larger draft model rarely pays off
REMEDY = "use a draft model of the target's family"


class ModelInfo(Protocol):
    """A model's config and tokenizer; its weights need not be there."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class DescribedModel:
    """A model known from its small files: config and tokenizer."""

    config: ModelConfig
    tokenizer: Tokenizer


@dataclass(frozen=True)
class DraftCompat:
    """The way a draft model can draft for a target, or the reason why it cannot."""

    kind: Kind
    message: str
    notes: tuple[str, ...] = ()
    parameters: tuple[int, int] | None = None  # of the target and of the draft model
    vocab_map: VocabMap | None = field(default=None, repr=False, compare=False)  # translates between vocabularies

    @property
    def works(self) -> bool:
        return self.kind != "refused"

    @property
    def weight_ratio(self) -> float | None:
        """Return the draft model's size relative to the target's: what a draft token costs relative to a step."""
        return None if self.parameters is None else self.parameters[1] / self.parameters[0]

    @property
    def agreement(self) -> float | None:
        """Return the share of the target's tokens in ordinary text that the draft model tokenizes the same way."""
        if self.kind == "same":
            return 1.0
        return None if self.vocab_map is None else self.vocab_map.agreement


def check_draft_compat(target: ModelInfo, draft: ModelInfo) -> DraftCompat:
    """Compare the tokens of two models; vocabulary sizes say little, because they are padded."""
    counts = (parameters(target.config), parameters(draft.config))
    notes = tuple(cautions(target, draft, counts[1] / counts[0]))
    position = first_difference(target.tokenizer, draft.tokenizer)
    if position is None and target.tokenizer.vocab_size <= draft.config.vocab:
        return DraftCompat("same", "both have the same tokenizer", notes, counts)
    for name, model in (("target", target), ("draft", draft)):
        if problem := untranslatable(model.tokenizer):
            return DraftCompat("refused", f"the tokenizers differ, and the {name}'s {problem}; {REMEDY}", notes, counts)
    vocab_map = VocabMap.of(*(VocabSide(model.tokenizer, model.config.vocab) for model in (target, draft)))
    message = f"the tokenizers differ{describe_difference(position, target, draft)}; {vocab_map.summary}"
    return DraftCompat(vocab_map.method, message, notes, counts, vocab_map)


def untranslatable(tokenizer: Tokenizer) -> str | None:
    """Return why the text of a tokenizer cannot be re-tokenized by another, None if it can."""
    if not is_readable(tokenizer):
        return "tokens cannot be read one by one"
    return None if keeps_text(tokenizer) else "tokens do not keep text as it was written"


def describe_difference(position: int | None, target: ModelInfo, draft: ModelInfo) -> str:
    """Return the first difference of two tokenizers in words."""
    if position is None:
        return f": the draft's has {draft.config.vocab} tokens and the target's {target.tokenizer.vocab_size}"
    return f", first at token {position}: {target.tokenizer.piece(position)!r} and {draft.tokenizer.piece(position)!r}"


def cautions(target: ModelInfo, draft: ModelInfo, ratio: float) -> Iterator[str]:
    """Yield what a user should know about a pair that works."""
    pays = ""
    if ratio >= 1:
        pays = ", so it cannot pay off"
    elif ratio >= LARGE_DRAFT:
        pays = " and will rarely pay off; a tenth is usual"
    yield f"the draft has {ratio:.0%} of the target's weights{pays}"
    if draft.config.context < target.config.context:
        context = f"{draft.config.context:,} tokens and the target {target.config.context:,}"
        yield f"the draft takes {context}; longer sequences continue without drafts"
    if draft.config.vocab != target.config.vocab and draft.tokenizer.vocab_size == target.tokenizer.vocab_size:
        yield f"vocabularies of {target.config.vocab} and {draft.config.vocab} tokens differ by padding alone"


def parameters(config: ModelConfig) -> int:
    """Return the number of weights of a model."""
    inputs = config.layers * config.per_layer_width
    extra = inputs * (config.per_layer_vocab + config.width) + config.per_layer_width
    layers = sum(_layer_parameters(config, layer) for layer in range(config.layers))
    return layers + extra + config.width + config.vocab * config.width * (1 if config.tied else 2)


def _layer_parameters(config: ModelConfig, layer: int) -> int:
    sizes = config.layer_sizes[layer] if config.layer_sizes else None
    config = config.at(layer)
    keys = 0 if sizes is not None and sizes.kv_layer is not None else config.kv_heads
    values = keys if sizes is None or sizes.projects_values else 0
    width, heads = config.width, (config.heads + keys + values) * config.head_dim
    attention = width * heads + config.heads * config.head_dim * width
    biases = heads * config.qkv_bias + width * config.out_bias + (2 * config.ffn + width) * config.mlp_bias
    normed_heads = config.heads + keys if config.full_qk_norm else 1 + (keys > 0)
    norms = 2 * width * (config.pre_norms + config.sandwich_norms) + normed_heads * config.head_dim * config.qk_norm
    per_layer = config.per_layer_width and 2 * width * config.per_layer_width + width
    return attention + 3 * width * config.ffn + biases + norms + per_layer + config.layer_scales


def check_model_names(target: str, draft: str, progress: Callable[[str], None]) -> DraftCompat:
    """Check two models by name; an unsupported model is a pair that does not work."""
    models: list[DescribedModel] = []
    for name in (target, draft):
        try:
            models.append(look_up(name, progress))
        except UnsupportedModelError as error:
            return DraftCompat("refused", f"{name}: {error}")
    return check_draft_compat(*models)


def look_up(name: str, progress: Callable[[str], None]) -> DescribedModel:
    """Return a model's config and tokenizer; of a folder or a Hugging Face id only the small files are fetched."""
    checkpoint = light_checkpoint(name, progress)
    config = read_config(checkpoint)
    if checkpoint.kind == "gguf":
        return DescribedModel(config, Tokenizer.from_gguf(checkpoint.config))
    return DescribedModel(config, Tokenizer.from_files(checkpoint.tokenizer_files))


def light_checkpoint(name: str, progress: Callable[[str], None]) -> Checkpoint:
    """Return a checkpoint for its config and tokenizer; a GGUF file is fetched in full."""
    path = Path(os.path.expanduser(name))
    if name not in BUILTINS and os.path.isdir(path):
        return open_small_files(path)
    if name in BUILTINS or os.path.exists(path) or not REPO.fullmatch(name) or name.endswith(".gguf"):
        return open_checkpoint(resolve(name, progress))
    folder = huggingface_small_files(name)
    try:
        return open_small_files(folder)
    except ModelError as error:
        raise explain_folder_error(name, error) from error


def open_small_files(folder: Path) -> Checkpoint:
    """Open a folder that may lack its weights."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: has no {CONFIG}, so it is not a model folder")
    config, generation = read_json(folder / CONFIG), read_generation(folder)
    return Checkpoint(folder, "folder", config, generation, read_tokenizer_files(folder), {})


def huggingface_small_files(repo: str) -> Path:
    """Return the local folder of a repository, without its weights; fetched if needed."""
    small = [pattern for pattern in huggingface.WANTED if not pattern.endswith(".safetensors")]
    return huggingface.snapshot(repo, patterns=small)
