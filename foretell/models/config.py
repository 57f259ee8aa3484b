"""What a decoder is made of, whatever file said so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys: a kind and its numbers, as the checkpoint gives them."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: None means 0.1 * ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    factors: tuple[float, ...] = ()  # each pair of dimensions turns slower by its own (GGUF's `rope_freqs`)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama kind and its relatives; each field is something in which they differ."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    norm_eps: float = 1e-5
    ropes: tuple[Rope, ...] = ()  # one a layer
    windows: tuple[int | None, ...] = ()  # one a layer; None sees everything before it
    tied: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # Gemma: a norm after attention and after the feed-forward, too
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    family: str = "llama"

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads share key heads evenly"
        if not self.ropes:
            object.__setattr__(self, "ropes", (Rope(),) * self.layers)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
