"""A decoder of billions of weights that says what a small one says: real text at a large model's cost.

Every hidden unit, head and feed-forward unit is there `times` times; a matrix that reads repeated values is split into
parts that sum to the original, with noise that cancels. Layers beyond the small model's add nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.heads import Head, LayerConfig, Lender, make_head

SMOLLM2 = ModelConfig(
    vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, context=8192, norm_eps=1e-5
)


def random_base(device: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder of SmolLM2-135M's shape where its weights are not at hand: untied, or it would only repeat itself."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(replace(SMOLLM2, tied=False))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.to(dtype)


class Inflater:
    """Turns the weights of a decoder into those of its larger twin."""

    def __init__(self, times: int, device: str, noise: float = 0.5) -> None:
        self.times, self.noise = times, noise
        self.generator = torch.Generator(device).manual_seed(0)

    def repeated(self, weight: Tensor) -> Tensor:
        """Outputs, once for each copy."""
        return weight.repeat(self.times, *([1] * (weight.dim() - 1)))

    def split(self, weight: Tensor) -> Tensor:
        """[out, in] as [out, times * in], whose parts sum to the original."""
        out, inputs = weight.shape
        shape = (out, self.times, inputs)
        noise = (
            torch.randn(shape, generator=self.generator, device=weight.device) * self.noise * weight.std() / self.times
        )
        parts = (weight / self.times)[:, None] + noise - noise.mean(1, keepdim=True)
        return parts.reshape(out, -1)

    def rows(self, weight: Tensor, sizes: list[int]) -> Tensor:
        """A matrix whose outputs are several, one behind the other."""
        return torch.cat([self.repeated(self.split(part)) for part in weight.split(sizes)])


@torch.no_grad()
def inflate(base: Decoder, times: int = 7, layers: int = 32, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """The larger twin of `base`, on its device. `base` must not be packed yet."""
    c, device = base.config, str(base.embed.device)
    config = replace(
        c, width=c.width * times, layers=layers, heads=c.heads * times, kv_heads=c.kv_heads * times, ffn=c.ffn * times,
        tied=False, ropes=(c.ropes[0],) * layers, windows=(None,) * layers,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    with torch.device(device):
        big = Decoder(config)
    torch.set_default_dtype(torch.float32)
    inflater = Inflater(times, device)
    small, large = base.state_dict(), big.state_dict()
    heads = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    large["embed"].copy_(small["embed"].repeat(1, times))
    large["norm.weight"].copy_(inflater.repeated(small["norm.weight"]))
    large["head.weight"].copy_(inflater.split((small["embed"] if c.tied else small["head.weight"]).float()))
    for layer in range(layers):
        to, at = f"blocks.{layer}.", f"blocks.{min(layer, c.layers - 1)}."
        for norm in ("attention_norm.weight", "ffn_norm.weight"):
            large[to + norm].copy_(inflater.repeated(small[at + norm]))
        for name, sizes in (("attention.qkv", heads), ("ffn.gate_up", [c.ffn, c.ffn])):
            large[f"{to}{name}.weight"].copy_(inflater.rows(small[f"{at}{name}.weight"].float(), sizes))
        for name in ("attention.out", "ffn.down"):
            weight = small[f"{at}{name}.weight"].float()
            kept = 1.0 if layer < c.layers else 0.0  # more depth costs as much and changes nothing
            large[f"{to}{name}.weight"].copy_(inflater.rows(weight, [len(weight)]) * kept)
    return big


@torch.no_grad()
def inflate_head(head: Head[Any], target: Decoder, times: int, context: int) -> Head[Any]:
    """The head's larger twin, for a target that was inflated as often: the same guesses at a large head's cost."""
    c = head.config
    layer = replace(
        c.layer, width=c.layer.width * times, heads=c.layer.heads * times, kv_heads=c.layer.kv_heads * times,
        ffn=c.layer.ffn * times,
    )  # fmt: skip
    embed = target.embed
    with torch.device(embed.device):
        big: Head[Any] = make_head(replace(c, layer=layer, target_width=c.target_width * times))
    inflater, large = Inflater(times, str(embed.device)), big.state_dict()
    for name, small in head.own_state().items():
        large[name].copy_(_inflated(inflater, name, small, c.layer) if name != "draft_ids" else small)
    big.to(embed.dtype).eval()
    big.borrow(Lender.of(target))
    big.prepare(context)
    return big


def _inflated(inflater: Inflater, name: str, weight: Tensor, layer: LayerConfig) -> Tensor:
    """A head's tensor; matrices that read several states, or give several things, are made of as many parts."""
    if weight.dim() == 1:
        return inflater.repeated(weight)
    keys = layer.kv_heads * layer.head_dim
    given = {"attention.kv": [keys, keys], "ffn.gate_up": [layer.ffn, layer.ffn]}
    sizes = next((found for part, found in given.items() if part in name), [len(weight)])
    read = layer.width if name.startswith("fc.") or weight.shape[1] == 2 * layer.width else weight.shape[1]
    return torch.cat([inflater.rows(part.float(), sizes) for part in weight.split(read, 1)], 1)
