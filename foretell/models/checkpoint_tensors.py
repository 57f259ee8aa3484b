"""The tensors of a checkpoint that a decoder reads: without those for images, and with fused tensors split."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foretell.errors import ModelError
from foretell.hub.tensor import LazyTensor
from foretell.models.families import MULTIMODAL

if TYPE_CHECKING:
    import torch

    from foretell.hub.checkpoint import Checkpoint
    from foretell.models.config import ModelConfig

WRAPPERS = re.compile(r"^((model|language_model)\.)+")
QKV = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"}
GATE_UP = {"mlp.gate_proj": "gate", "mlp.up_proj": "up"}
# By family and fused name: the names of the tensors that are stacked in it, with their parts.
FUSED = {
    "phi3": {
        "self_attn.qkv_proj": QKV,
        "mlp.gate_up_proj": GATE_UP,
        "attn_qkv": {"attn_q": "q", "attn_k": "k", "attn_v": "v"},
        "ffn_up": {"ffn_gate": "gate", "ffn_up": "up"},
    },
    "granite": {"shared_mlp.input_linear": GATE_UP, "shared_mlp.output_linear": {"mlp.down_proj": "down"}},
}


def plain_name(name: str) -> str:
    """Return the name without prefixes of wrapper modules."""
    return WRAPPERS.sub("", name)


def text_tensors(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of a text model by plain name. Each keeps the name of its tensor in the file, for errors."""
    fused = FUSED.get(config.family, {})
    skipped = MULTIMODAL.get(str(checkpoint.config.get("model_type")), ()) if checkpoint.kind == "folder" else ()
    for name, tensor in checkpoint.tensors():
        plain = plain_name(name)
        layer, part, kind = _split_name(plain)
        if part in fused:
            for each, rows in split_rows(tensor, fused[part], config).items():
                yield f"{layer}{each}{kind}", rows
        elif not plain.startswith(skipped or ("\0",)):
            yield plain, tensor


def file_name(name: str, family: str) -> str:
    """Return the name that the tensor of a part has in files of a family: that of the fused one, if it is stacked."""
    layer, part, kind = _split_name(name)
    fused = next((whole for whole, parts in FUSED.get(family, {}).items() if part in parts), part)
    return f"{layer}{fused}{kind}"


def _split_name(name: str) -> tuple[str, str, str]:
    """Return the layer, the module within it and the parameter of a tensor, such as `layers.0.`, ..., `.weight`."""
    found = re.fullmatch(r"((?:layers|blk)\.\d+\.)(.+)(\.(?:weight|bias))", name)
    return (found[1], found[2], found[3]) if found else ("", name, "")


def split_rows(tensor: LazyTensor, parts: dict[str, str], config: ModelConfig) -> dict[str, LazyTensor]:
    """Return views of the tensors that are stacked in a fused one."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {"q": q, "k": kv, "v": kv, "gate": config.ffn, "up": config.ffn, "down": config.width}
    total = sum(sizes[part] for part in parts.values())
    if not tensor.shape or tensor.shape[0] != total:
        found, wanted = list(tensor.shape), [total, *tensor.shape[1:]]
        raise ModelError(f"tensor {tensor.name!r} has shape {found}, but the config requires {wanted}")
    views, start = {}, 0
    for name, part in parts.items():
        stop = start + sizes[part]
        views[name] = replace(
            tensor,
            shape=(sizes[part], *tensor.shape[1:]),
            read=partial(tensor.rows, start, stop),
            read_rows=partial(_read_rows, tensor, start, stop),
        )
        start = stop
    return views


def _read_rows(tensor: LazyTensor, start: int, stop: int, first: int, last: int) -> torch.Tensor:
    return tensor.rows(start + first, min(start + last, stop))
