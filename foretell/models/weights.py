"""Which tensor of a checkpoint fills which rows of which parameter, and the filling."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.config import ModelConfig
from foretell.models.decoder import Block, Decoder
from foretell.models.layers import Linear
from foretell.models.sharding import Shard

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint
    from foretell.hub.tensor import LazyTensor

CHUNK = 1024  # rows of a tensor read at a time where only some of its columns are kept


@dataclass(frozen=True)
class TensorSlice:
    """The part of a tensor that a rank has: a run of rows, or of columns where the others have the rest of each sum."""

    rows: range | None = None
    columns: range | None = None

    def read(self, tensor: LazyTensor) -> Tensor:
        """That part alone."""
        if self.rows is not None:
            return tensor.rows(self.rows.start, self.rows.stop)
        if self.columns is None:
            return tensor.load()
        some = slice(self.columns.start, self.columns.stop)
        chunks = range(0, tensor.shape[0], CHUNK)
        return torch.cat([tensor.rows(at, at + CHUNK)[:, some] for at in chunks])


WHOLE = TensorSlice()
NONE = TensorSlice(rows=range(0))  # a bias that another rank adds


class RankSlices:
    """Which part of each tensor this rank's decoder has."""

    def __init__(self, decoder: Decoder) -> None:
        self.shard, self.rows, self.columns = decoder.shard, dict[str, range](), dict[str, range]()
        if self.shard is not None:
            self._deal(self.shard, decoder.config)

    def _deal(self, shard: Shard, config: ModelConfig) -> None:
        heads, keys = (_times(part, config.head_dim) for part in (shard.heads(config), shard.kv_heads(config)))
        ffn = shard.ffn(config)
        self.rows = {"q": heads, "k": keys, "v": keys, "gate": ffn, "up": ffn, "head": shard.vocab(config)}
        self.columns = {"out": heads, "down": ffn}

    def slice_of(self, part: str, kind: str) -> TensorSlice:
        """`kind` is weight or bias. The bias of a sum over ranks is the first one's to add."""
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
}
WRAPPERS = re.compile(r"^((model|language_model)\.)+")
ROPE_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn_rot_embd\.weight)$")  # worked out from the config instead


@dataclass(frozen=True)
class ParameterRows:
    """Rows of a parameter that one tensor fills."""

    rows: Tensor
    heads: int = 0  # where rows that turn together lie side by side, as llama.cpp has them, not half a head apart
    add: float = 0.0  # Gemma's norms are stored less one
    cut: TensorSlice = WHOLE

    def fill(self, values: Tensor) -> None:
        """Put the values into the rows, without a copy of them in between."""
        rows = self.rows
        if self.heads:
            rows = rows.view(self.heads, 2, -1, *rows.shape[1:])
            values = values.view(self.heads, -1, 2, *values.shape[1:]).transpose(1, 2)
        if self.add:
            values = values.float() + self.add
        rows.copy_(values)


def check_tensors(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Before anything is read: the checkpoint has every tensor the decoder needs, each once, and no other."""
    slots, seen = map_parameters(decoder, checkpoint.kind == "gguf"), set()
    names = {_plain(name) for name, _ in checkpoint.tensors()}
    for name, tensor in checkpoint.tensors():
        plain = _plain(name)
        if plain in seen:
            raise ModelError(f"tensor {name!r} is there twice under two names; keep one of them")
        seen.add(plain)
        if plain in slots:
            _check_shape(tensor, slots[plain].rows)
        elif _is_tied_head(plain, decoder.config):
            _check_shape(tensor, decoder.embed)
        elif not _is_spare(plain, decoder.config) and not is_mtp_tensor(plain, names):
            raise _misplaced(name, decoder.config.family)
    if missing := [name for name in slots if name not in seen]:
        raise ModelError(f"tensor {missing[0]!r} is missing from the checkpoint, {len(missing)} in all; fetch it again")


def fill_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Fill every parameter, one tensor at a time; they fit, for `check_tensors` has passed."""
    slots = map_parameters(decoder, checkpoint.kind == "gguf")
    for name, tensor in checkpoint.tensors():
        if (slot := slots.get(_plain(name))) is not None:
            _fill(slot, tensor, checkpoint)
    for name, tensor in checkpoint.tensors():
        if _is_tied_head(_plain(name), decoder.config):
            _check_tied(tensor, slots[_embedding_name(checkpoint.kind == "gguf")], checkpoint)


def _fill(slot: ParameterRows, tensor: LazyTensor, checkpoint: Checkpoint) -> None:
    """Fill a slot with numbers, and nothing else: others would become an empty answer, and no error."""
    if slot.cut is NONE:
        slot.rows.zero_()
        return
    values = slot.cut.read(tensor)
    slot.fill(values)
    if not _is_finite(slot.rows):
        raise _not_finite(tensor, values, slot.rows.dtype, checkpoint)


def _is_finite(values: Tensor) -> bool:
    # Both ends are NaN where any value is. Unlike a sum they cannot overflow, and they take no memory.
    least, most = torch.aminmax(values)
    return math.isfinite(least.item()) and math.isfinite(most.item())


def _not_finite(tensor: LazyTensor, values: Tensor, dtype: torch.dtype, checkpoint: Checkpoint) -> ModelError:
    where = f"{checkpoint.path}: tensor {tensor.name!r} has values"
    if _is_finite(values.float()):
        return ModelError(f"{where} too large for {str(dtype).removeprefix('torch.')}; set dtype to float32")
    return ModelError(f"{where} that are not finite numbers: the file is damaged; fetch it again")


def _plain(name: str) -> str:
    """The name without what only says how the model was saved."""
    return WRAPPERS.sub("", name)


def _check_shape(tensor: LazyTensor, rows: Tensor) -> None:
    if tuple(tensor.shape) != tuple(rows.shape):
        wanted, found = list(rows.shape), list(tensor.shape)
        raise ModelError(f"tensor {tensor.name!r} has shape {found}, but the config asks for {wanted}")


def _check_tied(head: LazyTensor, slot: ParameterRows, checkpoint: Checkpoint) -> None:
    values, embed = slot.cut.read(head), slot.rows
    if not torch.equal(values.to(embed), embed):
        if not _is_finite(values.float()):
            raise _not_finite(head, values, embed.dtype, checkpoint)
        raise ModelError(f"tensor {head.name!r} differs from the embedding; set tie_word_embeddings to false to use it")


def _is_tied_head(name: str, config: ModelConfig) -> bool:
    """Whether this is a head stored beside the embedding it is tied to."""
    return config.tied and name == "lm_head.weight"


def _misplaced(name: str, family: str) -> ModelError:
    if "lora_" in name:
        return UnsupportedModelError(
            f"tensor {name!r} is an adapter's, which is not supported; merge it into its model"
        )
    return ModelError(f"tensor {name!r} has no place in this {family} model; are config and weights of one model?")


def _is_spare(name: str, config: ModelConfig) -> bool:
    """Whether the decoder does without this tensor: the config has had what it says."""
    return bool(ROPE_BUFFERS.search(name)) or (name == "rope_freqs.weight" and bool(config.ropes[0].factors))


def is_mtp_tensor(name: str, names: Container[str]) -> bool:
    """Whether a tensor of a checkpoint, by its plain name, is part of a module for multi-token prediction: a drafter's
    affair. Qwen calls it `mtp`, DeepSeek puts it behind the last layer."""
    layer = re.match(r"layers\.\d+\.", name)
    return name.startswith("mtp.") or (layer is not None and f"{layer[0]}eh_proj.weight" in names)


def map_parameters(decoder: Decoder, is_gguf: bool) -> dict[str, ParameterRows]:
    """For every tensor that belongs in the checkpoint what it fills; together, every parameter once."""
    config, cuts = decoder.config, RankSlices(decoder)
    names = GGUF if is_gguf else HF_SANDWICH if config.sandwich_norms else HF
    add = 0.0 if is_gguf or config.family != "gemma3" else 1.0
    local = decoder.local
    heads = {"q": local.heads, "k": local.kv_heads} if is_gguf and config.family == "llama" else {}
    slots = {
        _embedding_name(is_gguf): ParameterRows(decoder.embed, cut=cuts.slice_of("head", "weight")),
        f"{names['norm']}.weight": ParameterRows(decoder.norm.weight, 0, add),
    }
    if not config.tied:
        rows = _linear_slots(decoder.head, {"head": local.vocab}, cuts)
        slots |= {f"{names['head']}.{kind}": slot for _, kind, slot in rows}
    for layer, block in enumerate(decoder.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        for part, kind, slot in _block_slots(block, local, cuts, heads, add):
            slots[f"{names['block']}.{layer}.{names[part]}.{kind}"] = slot
    return slots


def output_tensor(checkpoint: Checkpoint, config: ModelConfig) -> LazyTensor:
    """The tensor of the output's rows, which may be the embedding's."""
    is_gguf = checkpoint.kind == "gguf"
    wanted = _embedding_name(is_gguf) if config.tied else f"{(GGUF if is_gguf else HF)['head']}.weight"
    return next(tensor for name, tensor in checkpoint.tensors() if _plain(name) == wanted)


def _embedding_name(is_gguf: bool) -> str:
    return f"{(GGUF if is_gguf else HF)['embed']}.weight"


Slots = Iterator[tuple[str, str, ParameterRows]]  # a part's name, weight or bias, and what fills it


def _block_slots(block: Block, config: ModelConfig, cuts: RankSlices, heads: dict[str, int], add: float) -> Slots:
    attention, ffn, dim = block.attention, block.ffn, config.head_dim
    qkv = {"q": config.heads * dim, "k": config.kv_heads * dim, "v": config.kv_heads * dim}
    yield from _linear_slots(attention.qkv, qkv, cuts, heads)
    yield from _linear_slots(attention.out, {"out": config.width}, cuts)
    yield from _linear_slots(ffn.gate_up, {"gate": config.ffn, "up": config.ffn}, cuts)
    yield from _linear_slots(ffn.down, {"down": config.width}, cuts)
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


def _linear_slots(
    linear: Linear, parts: dict[str, int], cuts: RankSlices, heads: dict[str, int] | None = None
) -> Slots:
    """`parts` are the tensors that stand one under another in this layer, and how many rows each has."""
    for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
        if parameter is not None:
            for part, rows in zip(parts, parameter.split_with_sizes(list(parts.values())), strict=True):
                yield part, kind, ParameterRows(rows, (heads or {}).get(part, 0), cut=cuts.slice_of(part, kind))
