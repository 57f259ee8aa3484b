"""The architecture of a decoder, independent of the file format it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """RoPE settings of a layer, as the checkpoint states them."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # YaRN; None: 0.1 * ln(factor) + 1
    truncate: bool = True  # YaRN: round the ends of the ramp to integer dimensions
    factors: tuple[float, ...] = ()  # divisors of the frequency of each pair of dimensions (`rope_freqs` in GGUF)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family; each field is something in which its members differ."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    norm_eps: float = 1e-5
    ropes: tuple[Rope, ...] = ()  # one per layer
    windows: tuple[int | None, ...] = ()  # sliding window per layer; None: full attention
    tied: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # Gemma: norms after attention and feed-forward as well
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    family: str = "llama"

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads are a multiple of KV heads"
        if not self.ropes:
            object.__setattr__(self, "ropes", (Rope(),) * self.layers)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)

    @property
    def scale(self) -> float:
        """Return the factor of attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
