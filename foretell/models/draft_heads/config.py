"""Configs of draft heads and their `config.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from foretell.errors import ModelError
from foretell.models.config import Activation, ModelConfig, Rope

FORMAT = "foretell-head"  # format name in `config.json`, to recognize our own files
VERSION = 1
FILE = "config.json"
JSON_NAMES = {"hidden_layers": "taps"}  # fields whose name in the file differs; the file format is fixed

Config = TypeVar("Config", bound="HeadConfig")


@dataclass(frozen=True)
class LayerConfig:
    """A decoder layer of a head."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    window: int | None = None
    activation: Activation = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads are a multiple of KV heads"

    @property
    def scale(self) -> float:
        """Return the factor of attention scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class HeadConfig:
    """Settings that all draft heads share. Field names are written to `config.json`, except for `JSON_NAMES`.

    `hidden_layers` are the layers of the target whose output the head reads: 0 is the embedding, `layers` the output
    of the last layer before the final norm.
    """

    kind: ClassVar[str] = ""

    layer: LayerConfig
    vocab: int  # the target's
    target_width: int
    hidden_layers: tuple[int, ...]
    target_norm: bool = False  # whether the target's final norm is applied to its hidden states
    draft_vocab: int | None = None  # size of the draft vocabulary, the tensor `draft_ids`; None: all tokens
    own_embed: bool = False  # else the target's embedding is shared
    own_output: bool = False  # else the target's LM head is shared
    embed_scale: float = 1.0
    accuracy: tuple[float, ...] = ()  # acceptance rate of the first, second .. draft token in training; (): unknown
    target: str = ""  # name of the target it was trained for

    @property
    def input_width(self) -> int:
        """Return the width of the input of a position: hidden states of the target and, for some heads, token hints."""
        return len(self.hidden_layers) * self.target_width

    @property
    def outputs(self) -> int:
        """Return the size of the draft vocabulary."""
        return self.vocab if self.draft_vocab is None else self.draft_vocab

    def write(self, folder: Path) -> None:
        """Write `config.json` to `folder`."""
        (folder / FILE).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        values = {JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}
        return {"format": FORMAT, "version": VERSION, "kind": self.kind, **values}

    @classmethod
    def from_json(cls: type[Config], raw: dict[str, Any]) -> Config:
        """Return the config from the content of `config.json`."""
        known = {JSON_NAMES.get(field.name, field.name): field.name for field in fields(cls)}
        unknown = set(raw) - set(known) - {"format", "version", "kind"}
        if unknown or raw.get("kind") != cls.kind:
            what = f"unknown fields: {', '.join(sorted(unknown))}" if unknown else f"kind {raw.get('kind')!r}"
            raise ModelError(f"the config of a {cls.kind} head has {what}")
        values = {known[name]: _frozen(value) for name, value in raw.items() if name in known}
        return cls(**{**values, "layer": _layer(raw["layer"])})


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """EAGLE-1 and EAGLE-3: drafts one token at a time from the target's hidden state and then from its own."""

    kind: ClassVar[str] = "eagle"

    layers: int = 1
    generation: int = 3  # 1: projects [embedding, hidden state]; 3: projects hidden layers, attends over both
    fc_bias: bool = False
    fc_norm: bool = False  # 3.1: a norm per hidden layer before the projection
    norm_before_fc: bool = False  # one norm over all hidden layers
    norm_before_residual: bool = False
    norm_output: bool = False  # 3.1: the next step reads the normalized state


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """Multi-token prediction of DeepSeek and Qwen: a decoder layer over [embedding, state], applied repeatedly."""

    kind: ClassVar[str] = "mtp"

    layers: int = 1
    norm_output: bool = False  # Qwen: the next step reads the normalized state


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """DFlash and DSpark: drafts a block in one pass, over keys and values of the target's hidden states."""

    kind: ClassVar[str] = "block"

    layers: int = 1
    block: int = 8  # rows of a pass: the anchor and the masked positions after it
    sample_from_anchor: bool = True  # DSpark: a row predicts the next position; else its own
    causal_in_block: bool = False
    mask_token: int | None = None  # token at masked positions; None: a learned embedding, `mask`
    anchored: bool = False  # whether each masked position has its own mask, added to the anchor's embedding
    fc_norm: bool = False  # a norm per hidden layer, and for token hints, before the projection
    look_back: int = 0  # recent tokens, the position's own included, that are hints for copying; 0: none
    markov_rank: int = 0  # 0: no Markov head
    confidence: bool = False
    confidence_with_markov: bool = True

    def __post_init__(self) -> None:
        if self.look_back < 0 or (self.look_back and self.target_width % self.look_back):
            raise ModelError(
                f"look_back is {self.look_back}; it must be 0, or divide the target's width, {self.target_width}"
            )
        if self.look_back and self.target_norm:
            raise ModelError("a block head with look_back has its own norms; target_norm must be false")

    @property
    def input_width(self) -> int:
        return super().input_width + (self.target_width if self.look_back else 0)

    @property
    def drafts(self) -> int:
        """Return the draft tokens of a pass."""
        return self.block if self.sample_from_anchor else self.block - 1


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Medusa: each head drafts one position further, from the same state. Of `layer` only width and norm are used."""

    kind: ClassVar[str] = "medusa"

    heads: int = 3
    layers: int = 1  # residual blocks per head
    bias: bool = True
    shared_output: bool = False  # whether all heads share one output matrix of their own


@dataclass(frozen=True)
class DistilledConfig(HeadConfig):
    """A small model over tokens only. It reads the embedding layer because the interface passes hidden states."""

    kind: ClassVar[str] = "distilled"

    layers: int = 4


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """Gemma 4's `assistant`: layers that attend to the target's own KV. It is read from its authors' format only.

    The `kv_layer` of each layer of `decoder` is the layer of the target whose keys and values it attends to.
    """

    kind: ClassVar[str] = "assistant"

    decoder: ModelConfig
    centroids: int = 0  # clusters of the vocabulary; 0: logits of all tokens
    active_centroids: int = 0  # clusters whose tokens get logits


KINDS: dict[str, type[HeadConfig]] = {
    c.kind: c for c in (EagleConfig, MtpConfig, BlockConfig, MedusaConfig, DistilledConfig)
}


def read_head_config(raw: dict[str, Any]) -> HeadConfig:
    """Return the config of a head in our own format, of any kind."""
    if raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise ModelError(f"not a {FORMAT} config of version {VERSION}")
    if raw.get("kind") not in KINDS:
        raise ModelError(f"unknown kind of head {raw.get('kind')!r}; there are {', '.join(KINDS)}")
    return KINDS[raw["kind"]].from_json(raw)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layer(raw: dict[str, Any]) -> LayerConfig:
    rope: dict[str, Any] = {name: _frozen(value) for name, value in raw["rope"].items()}
    return LayerConfig(**{**raw, "rope": Rope(**rope)})
