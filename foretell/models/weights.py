"""Maps the tensors of a checkpoint to parameters of a decoder, checks them and loads them."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.checkpoint_tensors import file_name, plain_name, text_tensors
from foretell.models.config import ModelConfig
from foretell.models.decoder import Block, Decoder
from foretell.models.families import FAMILIES, Family
from foretell.models.layers import Linear
from foretell.models.rope import rotated_first
from foretell.models.sharding import Shard

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint
    from foretell.hub.tensor import LazyTensor

CHUNK = 1024  # rows read at a time when only some columns are kept


@dataclass(frozen=True)
class TensorSlice:
    """The part of a tensor on one rank: a range of rows (column parallel) or of columns (row parallel)."""

    rows: range | None = None
    columns: range | None = None

    def read(self, tensor: LazyTensor) -> Tensor:
        """Read only this part of the tensor."""
        if self.rows is not None:
            return tensor.rows(self.rows.start, self.rows.stop)
        if self.columns is None:
            return tensor.load()
        some = slice(self.columns.start, self.columns.stop)
        chunks = range(0, tensor.shape[0], CHUNK)
        return torch.cat([tensor.rows(at, at + CHUNK)[:, some] for at in chunks])


WHOLE = TensorSlice()
NONE = TensorSlice(rows=range(0))  # a bias that rank 0 adds


class RankSlices:
    """The slices of all tensors for one rank."""

    def __init__(self, decoder: Decoder) -> None:
        self.shard, self.rows, self.columns = decoder.shard, dict[str, range](), dict[str, range]()
        if self.shard is not None:
            self._assign(self.shard, decoder.config)

    def _assign(self, shard: Shard, config: ModelConfig) -> None:
        heads, keys = (_times(part, config.head_dim) for part in (shard.heads(config), shard.kv_heads(config)))
        ffn = shard.ffn(config)
        self.rows = {"q": heads, "k": keys, "v": keys, "gate": ffn, "up": ffn, "head": shard.vocab(config)}
        self.columns = {"out": heads, "down": ffn}

    def slice_of(self, part: str, kind: str) -> TensorSlice:
        """Return the slice of a tensor; `kind` is weight or bias. The bias of a row-parallel layer is on rank 0."""
        if self.shard is None or part in self.rows:
            return TensorSlice(rows=self.rows.get(part))
        if kind == "weight":
            return TensorSlice(columns=self.columns[part])
        return WHOLE if self.shard.rank == 0 else NONE


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)


HF = {
    "embed": "embed_tokens",
    "norm": "norm",
    "head": "lm_head",
    "block": "layers",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "per_layer_gate": "per_layer_input_gate",
    "per_layer_out": "per_layer_projection",
    "per_layer_norm": "post_per_layer_input_norm",
    "scale": "layer_scalar",
    "per_layer_embed": "embed_tokens_per_layer.weight",
    "per_layer_projection": "per_layer_model_projection.weight",
    "per_layer_projection_norm": "per_layer_projection_norm.weight",
}
HF_SANDWICH = HF | {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
GGUF = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "block": "blk",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "per_layer_gate": "inp_gate",
    "per_layer_out": "proj",
    "per_layer_norm": "post_norm",
    "scale": "layer_output_scale.weight",
    "per_layer_embed": "per_layer_token_embd.weight",
    "per_layer_projection": "per_layer_model_proj.weight",
    "per_layer_projection_norm": "per_layer_proj_norm.weight",
}
ROPE_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn_rot_embd\.weight)$")  # recomputed from the config
KEYS_AND_VALUES = re.compile(r"(?:layers|blk)\.(\d{1,4})\.(self_attn\.[kv]_(proj|norm)|attn_[kv](_norm)?)\.")
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # read with the config


@dataclass(frozen=True)
class ParameterRows:
    """The rows of a parameter that are loaded from one tensor."""

    rows: Tensor
    heads: int = 0  # if nonzero, RoPE pairs are interleaved as in llama.cpp, not half a head apart
    add: float = 0.0  # Gemma stores norm weights minus one
    source: TensorSlice = WHOLE
    order: tuple[int, ...] = ()  # dimensions of a head in the tensor, in our order; empty: the same order

    def fill(self, values: Tensor) -> None:
        """Copy the values into the rows without an intermediate tensor."""
        rows = self.rows
        if self.heads:
            rows = rows.view(self.heads, 2, -1, *rows.shape[1:])
            values = values.view(self.heads, -1, 2, *values.shape[1:]).transpose(1, 2)
        if self.order:
            heads = values.view(-1, len(self.order), *values.shape[1:])
            values = heads[:, list(self.order)].view(values.shape)
        if self.add:
            values = values.float() + self.add
        rows.copy_(values)


def check_tensors(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Check before loading that the checkpoint has exactly the tensors of the decoder, with the right shapes."""
    targets, seen = map_parameters(decoder, checkpoint.kind == "gguf"), set()
    names = {plain_name(name) for name, _ in checkpoint.tensors()}
    for plain, tensor in text_tensors(checkpoint, decoder.config):
        if plain in seen:
            raise ModelError(f"tensor {tensor.name!r} occurs twice under two names; keep one of them")
        seen.add(plain)
        if plain in targets:
            _check_shape(tensor, targets[plain].rows)
        elif _is_tied_head(plain, decoder.config):
            _check_shape(tensor, decoder.embed)
        elif not _is_redundant(plain, decoder.config) and not is_mtp_tensor(plain, names):
            raise _misplaced(tensor.name, decoder.config.family)
    if missing := [file_name(name, decoder.config.family) for name in targets if name not in seen]:
        count = len(dict.fromkeys(missing))
        raise ModelError(f"tensor {missing[0]!r} is missing from the checkpoint, {count} in all; download it again")


def fill_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Load every parameter, one tensor at a time, after `check_tensors`."""
    targets = map_parameters(decoder, checkpoint.kind == "gguf")
    for tensor, target in decoder_tensors(decoder, checkpoint):
        _fill(target, tensor, checkpoint)
    for name, tensor in text_tensors(checkpoint, decoder.config):
        if _is_tied_head(name, decoder.config):
            _check_tied(tensor, targets[_embedding_name(checkpoint.kind == "gguf")], checkpoint)


def decoder_tensors(decoder: Decoder, checkpoint: Checkpoint) -> Iterator[tuple[LazyTensor, ParameterRows]]:
    """Yield each tensor of the checkpoint that is a part of the decoder, with the rows it fills."""
    targets = map_parameters(decoder, checkpoint.kind == "gguf")
    for name, tensor in text_tensors(checkpoint, decoder.config):
        if (target := targets.get(name)) is not None:
            yield tensor, target


def layer_matrices(decoder: Decoder, checkpoint: Checkpoint) -> Iterator[LazyTensor]:
    """Yield the matrices that a step multiplies with, without the LM head."""
    is_gguf = checkpoint.kind == "gguf"
    names = tensor_names(decoder.config, is_gguf)
    ends = {_embedding_name(is_gguf), f"{names['head']}.weight", names["per_layer_embed"]}
    wanted = map_parameters(decoder, is_gguf).keys() - ends
    for name, tensor in text_tensors(checkpoint, decoder.config):
        if name in wanted and len(tensor.shape) == 2:
            yield tensor


def _fill(target: ParameterRows, tensor: LazyTensor, checkpoint: Checkpoint) -> None:
    """Load one tensor and check that its values are finite: others would give empty output without an error."""
    if target.source is NONE:
        target.rows.zero_()
        return
    values = target.source.read(tensor)
    target.fill(values)
    if not _is_finite(target.rows):
        raise _not_finite(tensor, values, target.rows.dtype, checkpoint)


def _is_finite(values: Tensor) -> bool:
    # Minimum and maximum are NaN if any value is. Unlike a sum they cannot overflow and need no memory.
    least, most = torch.aminmax(values)
    return math.isfinite(least.item()) and math.isfinite(most.item())


def _not_finite(tensor: LazyTensor, values: Tensor, dtype: torch.dtype, checkpoint: Checkpoint) -> ModelError:
    where = f"{checkpoint.path}: tensor {tensor.name!r} has values"
    if _is_finite(values.float()):
        return ModelError(f"{where} too large for {str(dtype).removeprefix('torch.')}; set dtype to float32")
    return ModelError(f"{where} that are not finite: the file is damaged; download it again")


def _check_shape(tensor: LazyTensor, rows: Tensor) -> None:
    if tuple(tensor.shape) != tuple(rows.shape):
        wanted, found = list(rows.shape), list(tensor.shape)
        raise ModelError(f"tensor {tensor.name!r} has shape {found}, but the config requires {wanted}")


def _check_tied(head: LazyTensor, target: ParameterRows, checkpoint: Checkpoint) -> None:
    values, embed = target.source.read(head), target.rows
    if not torch.equal(values.to(embed), embed):
        if not _is_finite(values.float()):
            raise _not_finite(head, values, embed.dtype, checkpoint)
        raise ModelError(f"tensor {head.name!r} differs from the embedding; set tie_word_embeddings to false to use it")


def _is_tied_head(name: str, config: ModelConfig) -> bool:
    """Return whether this is an LM head stored in addition to the embedding it is tied to."""
    return config.tied and name == "lm_head.weight"


def _misplaced(name: str, family: str) -> ModelError:
    if "lora_" in name:
        return UnsupportedModelError(
            f"tensor {name!r} belongs to an adapter, which is not supported; merge it into its model"
        )
    return ModelError(f"tensor {name!r} does not belong to this {family} model; do config and weights match?")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Return whether the decoder does not need this tensor, because the config has its content."""
    if found := KEYS_AND_VALUES.match(name):  # stored although the layer attends to those of another
        layer = int(found[1])
        return layer < len(config.layer_sizes) and config.layer_sizes[layer].kv_layer is not None
    return bool(ROPE_BUFFERS.search(name)) or (name in ROPE_FACTORS and any(rope.factors for rope in config.ropes))


def is_mtp_tensor(name: str, names: Container[str]) -> bool:
    """Return whether a tensor belongs to a multi-token prediction module, which is a draft head.

    Qwen names it `mtp`; DeepSeek stores it after the last layer.
    """
    layer = re.match(r"layers\.\d+\.", name)
    return name.startswith("mtp.") or (layer is not None and f"{layer[0]}eh_proj.weight" in names)


def map_parameters(decoder: Decoder, is_gguf: bool) -> dict[str, ParameterRows]:
    """Return the rows of parameters for every tensor of the checkpoint; together they cover each parameter once."""
    config, slices = decoder.config, RankSlices(decoder)
    names = tensor_names(config, is_gguf)
    family = FAMILIES.get(config.family, Family(config.family))
    add = 1.0 if family.norm_offset and not is_gguf else 0.0
    local = decoder.local
    heads = {"q": local.heads, "k": local.kv_heads} if is_gguf and family.interleaved else {}
    targets = {
        _embedding_name(is_gguf): ParameterRows(decoder.embed, source=slices.slice_of("head", "weight")),
        f"{names['norm']}.weight": ParameterRows(decoder.norm.weight, 0, add),
    }
    if not config.tied:
        rows = _linear_rows(decoder.head, {"head": local.vocab}, slices)
        targets |= {f"{names['head']}.{kind}": target for _, kind, target in rows}
    for layer, block in enumerate(decoder.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        for part, kind, target in _block_rows(block, slices, heads, add):
            targets[f"{names['block']}.{layer}.{names[part]}.{kind}"] = target
        if block.scale is not None:
            targets[f"{names['block']}.{layer}.{names['scale']}"] = ParameterRows(block.scale)
    if (inputs := decoder.per_layer) is not None:
        assert inputs.projection.weight is not None, "the weights are not packed"
        targets[names["per_layer_embed"]] = ParameterRows(inputs.embed)
        targets[names["per_layer_projection"]] = ParameterRows(inputs.projection.weight)
        targets[names["per_layer_projection_norm"]] = ParameterRows(inputs.norm.weight)
    return targets


def tensor_names(config: ModelConfig, is_gguf: bool) -> dict[str, str]:
    """Return the names of the parts of a model in its checkpoints."""
    if not is_gguf:
        return HF_SANDWICH if config.sandwich_norms else HF
    return GGUF | {"ffn_norm": GGUF["attention_post_norm"]} if config.family == "seed_oss" else GGUF


def output_tensor(checkpoint: Checkpoint, config: ModelConfig) -> LazyTensor:
    """Return the tensor of the LM head, which may be the embedding."""
    is_gguf = checkpoint.kind == "gguf"
    wanted = _embedding_name(is_gguf) if config.tied else f"{(GGUF if is_gguf else HF)['head']}.weight"
    return next(tensor for name, tensor in checkpoint.tensors() if plain_name(name) == wanted)


def _embedding_name(is_gguf: bool) -> str:
    return f"{(GGUF if is_gguf else HF)['embed']}.weight"


NamedRows = Iterator[tuple[str, str, ParameterRows]]  # name of a part, weight or bias, and its rows


def _block_rows(block: Block, slices: RankSlices, heads: dict[str, int], add: float) -> NamedRows:
    attention, ffn = block.attention, block.ffn
    config, dim = attention.config, attention.config.head_dim
    parts = {"q": config.heads * dim, "k": attention.num_keys * dim, "v": attention.num_values * dim}
    qkv = {part: rows for part, rows in parts.items() if rows}
    order = tuple(rotated_first(attention.rope, dim)) if attention.rope.dims else ()
    for part, kind, target in _linear_rows(attention.qkv, qkv, slices, heads):
        yield part, kind, replace(target, order=order) if part in ("q", "k") else target
    yield from _linear_rows(attention.out, {"out": config.width}, slices)
    yield from _linear_rows(ffn.gate_up, {"gate": config.ffn, "up": config.ffn}, slices)
    yield from _linear_rows(ffn.down, {"down": config.width}, slices)
    if (mixing := block.per_layer) is not None:
        yield from _linear_rows(mixing.gate, {"per_layer_gate": config.per_layer_width}, slices)
        yield from _linear_rows(mixing.out, {"per_layer_out": config.width}, slices)
        yield "per_layer_norm", "weight", ParameterRows(mixing.norm.weight)
    norms = {
        "attention_norm": block.attention_norm,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
        "attention_post_norm": block.attention_post_norm,
        "ffn_norm": block.ffn_norm,
        "ffn_post_norm": block.ffn_post_norm,
    }
    for name, norm in norms.items():
        if norm is not None:
            yield name, "weight", ParameterRows(norm.weight, 0, add)


def _linear_rows(
    linear: Linear, parts: dict[str, int], slices: RankSlices, heads: dict[str, int] | None = None
) -> NamedRows:
    """Yield the rows of a layer that stacks several tensors; `parts` maps their names to numbers of rows."""
    for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
        if parameter is not None:
            for part, rows in zip(parts, parameter.split_with_sizes(list(parts.values())), strict=True):
                yield part, kind, ParameterRows(rows, (heads or {}).get(part, 0), source=slices.slice_of(part, kind))
