"""A decoder of billions of weights that says what a small one says: real text at a large model's cost.

Every hidden unit, head and feed-forward unit is there `times` times; a matrix that reads repeated values is split into
parts that sum to the original, with noise that cancels. Layers beyond the small model's add nothing.
`python bench/inflate.py FOLDER [--base smollm2-135m]` writes one as a folder that `--model` takes: 12 GB, in bf16.
`--times 1 --layers 30 --bits 4` writes a coarse copy of the base instead, which drafts well but not always.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from foretell.build.model_source import read_tokenizer
from foretell.hub import open_checkpoint, resolve
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead, LayerConfig, TargetWeights, make_head
from foretell.models.load import load_model

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
        """Inflate a matrix with several concatenated outputs."""
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
def inflate_head(head: DraftHead[Any], target: Decoder, times: int, context: int) -> DraftHead[Any]:
    """Inflate a head for an inflated target: the same drafts at the cost of a large head."""
    c = head.config
    layer = replace(
        c.layer, width=c.layer.width * times, heads=c.layer.heads * times, kv_heads=c.layer.kv_heads * times,
        ffn=c.layer.ffn * times,
    )  # fmt: skip
    embed = target.embed
    with torch.device(embed.device):
        big: DraftHead[Any] = make_head(replace(c, layer=layer, target_width=c.target_width * times))
    inflater, large = Inflater(times, str(embed.device)), big.state_dict()
    for name, small in head.own_state_dict().items():
        large[name].copy_(_inflated(inflater, name, small, c.layer) if name != "draft_ids" else small)
    big.to(embed.device, embed.dtype).eval()
    big.share_weights(TargetWeights.of(target))
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


TOGETHER = 4  # layers in a file
GROUP = 32  # inputs that share a scale


@torch.no_grad()
def coarsen(model: Decoder, bits: int) -> Decoder:
    """The same with the matrices of its layers on a grid of so many bits, kept as the floats they were."""
    most = 2 ** (bits - 1) - 1
    for block in model.blocks:
        for weight in block.parameters():
            if weight.dim() == 2:
                groups = weight.float().reshape(-1, GROUP)
                scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
                weight.copy_(((groups / scale).round() * scale).reshape(weight.shape))
    return model


def write_folder(model: Decoder, base: str | None, folder: Path) -> None:
    """The model as a folder, with the tokenizer of `base`, or one of bytes."""
    c = model.config
    folder.mkdir(parents=True)
    said = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": c.vocab, "hidden_size": c.width, "head_dim": c.head_dim,
        "intermediate_size": c.ffn, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "max_position_embeddings": c.context, "rms_norm_eps": c.norm_eps,
        "rope_theta": c.ropes[0].theta, "tie_word_embeddings": c.tied, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))
    for name, text in tokenizer_files(base).items():
        (folder / name).write_text(text)
    state = model.state_dict()
    ends = {"model.embed_tokens": "embed", "model.norm": "norm.weight", "lm_head": "head.weight"}
    save_file({f"{name}.weight": on_host(state[own]) for name, own in ends.items()}, folder / "model-ends.safetensors")
    for first in range(0, c.layers, TOGETHER):
        layers = range(first, min(first + TOGETHER, c.layers))
        tensors = {name: tensor for layer in layers for name, tensor in layer_tensors(state, layer, c).items()}
        save_file(tensors, folder / f"model-layers-{first:03}.safetensors")


def layer_tensors(state: dict[str, Tensor], layer: int, c: ModelConfig) -> dict[str, Tensor]:
    """Of one layer, by the names that other programs give them."""
    own, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
    heads = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    parts = {
        "input_layernorm": state[own + "attention_norm.weight"],
        "post_attention_layernorm": state[own + "ffn_norm.weight"],
        "self_attn.o_proj": state[own + "attention.out.weight"],
        "mlp.down_proj": state[own + "ffn.down.weight"],
    }
    several = (("attention.qkv", ("q", "k", "v"), heads), ("ffn.gate_up", ("gate", "up"), [c.ffn, c.ffn]))
    for name, letters, sizes in several:
        group = "self_attn" if name == "attention.qkv" else "mlp"
        split = state[f"{own}{name}.weight"].split(sizes)
        parts |= {f"{group}.{letter}_proj": part for letter, part in zip(letters, split, strict=True)}
    return {f"{theirs}{name}.weight": on_host(part) for name, part in parts.items()}


def on_host(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).cpu().contiguous()


def tokenizer_files(base: str | None) -> dict[str, str]:
    """Those of a folder, by name."""
    if base is not None:
        tokenizer = read_tokenizer(open_checkpoint(resolve(base, print)))
        ends = [tokenizer.piece(token) for token in sorted(tokenizer.end_ids)]
        named = {"chat_template": tokenizer.chat_template, "eos_token": ends[0] if ends else None}
        generation = {"eos_token_id": sorted(tokenizer.end_ids)}
        return {
            "tokenizer.json": tokenizer.as_json(),
            "tokenizer_config.json": json.dumps(named),
            "generation_config.json": json.dumps(generation),
        }
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({"<end>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return {"tokenizer.json": str(backend.to_str()), "tokenizer_config.json": json.dumps({"eos_token": "<end>"})}


def load_base(name: str | None, device: str) -> Decoder:
    """The named model in bf16, or a random one of SmolLM2-135M's shape."""
    if name is None:
        return random_base(device)
    return load_model(open_checkpoint(resolve(name, print)), torch.bfloat16, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", help="a model's name; else random weights of SmolLM2-135M's shape")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bits", type=int, choices=range(2, 9), help="round the layers' matrices to so many")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    model = inflate(load_base(given.base, given.device), given.times, given.layers)
    write_folder(model if given.bits is None else coarsen(model, given.bits), given.base, given.folder)


if __name__ == "__main__":
    main()
