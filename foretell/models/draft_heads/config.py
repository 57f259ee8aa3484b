"""What a head is made of, and the `config.json` that says so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from foretell.errors import ModelError
from foretell.models.config import Activation, Rope

FORMAT = "foretell-head"  # what `config.json` calls itself, so that no other format is taken for it
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
        assert self.heads % self.kv_heads == 0, "query heads share key heads evenly"

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class HeadConfig:
    """What all heads have: the target they were made for, where they tap it, and what they speak of.

    `taps` are places in the target's stream: 0 is its embedding, `layers` what its last layer gives, before the norm.
    """

    kind: ClassVar[str] = ""

    layer: LayerConfig
    vocab: int  # the target's
    target_width: int
    hidden_layers: tuple[int, ...]
    target_norm: bool = False  # whether the target's own last norm stands before what is tapped
    draft_vocab: int | None = None  # tokens it can guess; None: all. Which they are is the tensor `draft_ids`
    own_embed: bool = False  # else the target's embedding is borrowed
    own_output: bool = False  # else the target's output rows are borrowed
    embed_scale: float = 1.0
    accuracy: tuple[float, ...] = ()  # how often the first, second .. guess stood when it was made; () is unknown
    target: str = ""  # the name of the target it was made for

    @property
    def input_width(self) -> int:
        """Of what it is given of a place: the target's states, and what else it wants to be known with them."""
        return len(self.hidden_layers) * self.target_width

    @property
    def outputs(self) -> int:
        """Tokens it can guess."""
        return self.vocab if self.draft_vocab is None else self.draft_vocab

    def write(self, folder: Path) -> None:
        """Say in `folder` what the head there is made of."""
        (folder / FILE).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """What `config.json` says."""
        values = {JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}
        return {"format": FORMAT, "version": VERSION, "kind": self.kind, **values}

    @classmethod
    def from_json(cls: type[Config], said: dict[str, Any]) -> Config:
        """From what `config.json` says."""
        known = {JSON_NAMES.get(field.name, field.name): field.name for field in fields(cls)}
        unknown = set(said) - set(known) - {"format", "version", "kind"}
        if unknown or said.get("kind") != cls.kind:
            what = f"fields it does not know: {', '.join(sorted(unknown))}" if unknown else f"kind {said.get('kind')!r}"
            raise ModelError(f"the config of a head for {cls.kind} has {what}")
        values = {known[name]: _frozen(value) for name, value in said.items() if name in known}
        return cls(**{**values, "layer": _layer(said["layer"])})


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """EAGLE-1 and EAGLE-3: one token at a time, from the target's feature and then from its own."""

    kind: ClassVar[str] = "eagle"

    layers: int = 1
    generation: int = 3  # 1: [embedding, feature] are projected; 3: taps are projected, both are attended
    fc_bias: bool = False
    fc_norm: bool = False  # 3.1: a norm of its own before the projection for each tap
    norm_before_fc: bool = False  # one norm for all taps together
    norm_before_residual: bool = False
    norm_output: bool = False  # 3.1: the next step gets the normed state


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """DeepSeek's and Qwen's multi-token prediction: a whole decoder layer over [embedding, state], used again."""

    kind: ClassVar[str] = "mtp"

    layers: int = 1
    norm_output: bool = False  # Qwen: the next step gets the normed state


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """DFlash and DSpark: a whole block in one pass, over keys and values made of the target's features."""

    kind: ClassVar[str] = "block"

    layers: int = 1
    block: int = 8  # rows of a pass: the anchor and the places behind it
    sample_from_anchor: bool = True  # DSpark: each row tells the next place's token. Else rows tell their own place's
    causal_in_block: bool = False
    mask_token: int | None = None  # stands in the places to be filled; None: an embedding of its own, `mask`
    anchored: bool = False  # whether each of those places has a mask of its own, added to the anchor's embedding
    fc_norm: bool = False  # a norm of its own before the projection for each tap, and for what is known beside them
    look_back: int = 0  # tokens, a place's own and those before it, that are known with its features: to copy by
    markov_rank: int = 0  # 0: no Markov head
    confidence: bool = False
    confidence_with_markov: bool = True

    def __post_init__(self) -> None:
        if self.look_back < 0 or (self.look_back and self.target_width % self.look_back):
            raise ModelError(
                f"look_back is {self.look_back}; it must be 0, or divide the target's width, {self.target_width}"
            )
        if self.look_back and self.target_norm:
            raise ModelError("a block head that looks back has norms of its own; target_norm must be false")

    @property
    def input_width(self) -> int:
        return super().input_width + (self.target_width if self.look_back else 0)

    @property
    def drafts(self) -> int:
        """Tokens a pass guesses."""
        return self.block if self.sample_from_anchor else self.block - 1


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Heads that each guess one place further, all from the same state. Of `layer` only width and norm count."""

    kind: ClassVar[str] = "medusa"

    heads: int = 3
    layers: int = 1  # blocks of a head
    bias: bool = True
    shared_output: bool = False  # whether an output matrix of its own is one for all heads, not one for each


@dataclass(frozen=True)
class DistilledConfig(HeadConfig):
    """A small model over tokens alone. It taps the embedding only because who serves heads hands on states."""

    kind: ClassVar[str] = "distilled"

    layers: int = 4


KINDS: dict[str, type[HeadConfig]] = {
    c.kind: c for c in (EagleConfig, MtpConfig, BlockConfig, MedusaConfig, DistilledConfig)
}


def read_head_config(said: dict[str, Any]) -> HeadConfig:
    """The config of a head of ours, of whichever kind."""
    if said.get("format") != FORMAT or said.get("version") != VERSION:
        raise ModelError(f"not a head's config of ours, version {VERSION}")
    if said.get("kind") not in KINDS:
        raise ModelError(f"a head of the kind {said.get('kind')!r} is not known; there are {', '.join(KINDS)}")
    return KINDS[said["kind"]].from_json(said)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layer(said: dict[str, Any]) -> LayerConfig:
    rope: dict[str, Any] = {name: _frozen(value) for name, value in said["rope"].items()}
    return LayerConfig(**{**said, "rope": Rope(**rope)})
