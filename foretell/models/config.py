"""The architecture of a decoder, independent of the file format it was read from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """RoPE settings of a layer, as the checkpoint states them."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "none"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # YaRN; None: 0.1 * ln(factor) + 1
    truncate: bool = True  # YaRN: round the ends of the ramp to integer dimensions
    factors: tuple[float, ...] = ()  # divisors of the frequency of each pair of dimensions (`rope_freqs` in GGUF)
    long_factors: tuple[float, ...] = ()  # LongRoPE: the divisors of models served beyond the original context
    dims: int = 0  # rotated dimensions of a head, the first ones in the checkpoint; 0: all
    query_growth: float = 0.0  # Ministral 3: queries are scaled by 1 + this * ln(1 + position // original_context)


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer of a model whose layers differ (Gemma 4)."""

    kv_heads: int
    head_dim: int
    ffn: int
    kv_layer: int | None = None  # the earlier layer whose keys and values are attended to; None: its own
    projects_values: bool = True  # False: values are the projected keys, before their norm and RoPE


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
    full_qk_norm: bool = False  # OLMo: the norm is over all heads together
    pre_norms: bool = True  # before attention and feed-forward; OLMo and EXAONE 4 have none
    sandwich_norms: bool = False  # norms after attention and feed-forward
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # Granite: factor of what each layer adds to the residual stream
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # Gemma 2: logits become cap * tanh(logits / cap)
    attention_softcap: float | None = None  # the same of attention scores
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    layer_sizes: tuple[LayerSizes, ...] = ()  # one per layer; empty: all have the sizes above
    v_norm: bool = False  # values are normalized, without weights
    layer_scales: bool = False  # the output of each layer is multiplied by a weight
    per_layer_width: int = 0  # Gemma 4: width of the input of each layer besides the residual stream; 0: none
    per_layer_vocab: int = 0
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

    def at(self, layer: int) -> ModelConfig:
        """Return the config with the sizes of one layer."""
        if not self.layer_sizes:
            return self
        sizes = self.layer_sizes[layer]
        return replace(self, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, ffn=sizes.ffn)
