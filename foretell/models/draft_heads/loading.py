"""Loads draft heads from folders: detects their kind, reads config and weights, and packs them for serving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.errors import ModelError, RequestError
from foretell.hub.checkpoint import CONFIG, Checkpoint, decoded_tensors, folder_tensors, read_json
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads.formats.mtp import mtp
from foretell.models.layers import Linear
from foretell.models.quantize import native_for, quantize_linear, quantize_linear_cuda
from foretell.models.sharding import Shard
from foretell.models.weights import is_mtp_tensor
from foretell.utils.system import trim_memory

from .base import DraftHead, TargetWeights
from .config import FORMAT, HeadConfig, read_head_config
from .formats import HeadFile, fill, kind_of, layout_of
from .io import SCALE, LazyTensors, dequantize, fill_head, make_head
from .layer import HeadAttention

SHIPPED = Path(__file__).parents[2] / "heads_data"
CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('FILE', weights_only=True), 'model.safetensors')\""
)


def shipped_head(target: str, kind: str) -> Path:
    """Return the folder of the head that ships with the package for a target."""
    folder = SHIPPED / target / kind
    if "/" in target or not folder.is_dir():
        raise RequestError(
            "drafter",
            f"no {kind} ships with the package for {target}; train one with `foretell train {kind} --target {target} "
            f"--out DIR` and name it {kind}:DIR",
        )
    return folder


def head_kind(folder: Path) -> str | None:
    """Return the kind of head in a folder; None if there is none."""
    if not (folder / CONFIG).is_file():
        return None
    config = read_json(folder / CONFIG)
    if config.get("format") == FORMAT:
        return kind_of(config, frozenset())
    check_weights(folder)
    return kind_of(config, frozenset(decoded_tensors(config, folder_tensors(folder))))


def check_weights(folder: Path) -> None:
    """Raise ModelError for pickled weights, which can run code when loaded."""
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: {pickled[0]} is a pickle file, which can run code, and is not loaded; convert it: "
            f"{CONVERT.replace('FILE', pickled[0])}"
        )


@dataclass(frozen=True)
class HeadSource:
    """A head whose config is read and whose weights are not loaded yet."""

    where: str
    folder: Path | None  # None: the target's own checkpoint
    config: HeadConfig
    file: HeadFile
    ours: bool  # whether it is in our own format, which needs no wiring check

    def bytes(self, shard: Shard | None = None) -> int:
        """Return an upper bound of the bytes of its weights, in float32; of a shard if given."""
        with torch.device("meta"):
            return sum(tensor.numel() * 4 for tensor in make_head(self.config, shard).own_state_dict().values())

    def load(
        self, shared: TargetWeights, dtype: torch.dtype, context: int, shard: Shard | None = None
    ) -> DraftHead[Any]:
        """Return the head, or a rank's shard, with its weights and those shared with the target, before packing."""
        if self.ours:
            head = make_head(self.config, shard)
            fill_head(head, self._own_tensors(), self.where)
        else:
            head = fill(layout_of(self.file), self.file, shard)
        head.to(shared.embed.device, dtype).eval()
        if head.embed is not None and torch.equal(head.embed, shared.embed.to(dtype)):  # many files repeat the target's
            head.embed, head.config = None, replace(head.config, own_embed=False)
        head.share_weights(shared)
        head.prepare(context)
        return head

    def _own_tensors(self) -> LazyTensors:
        tensors = self.file.tensors

        def read(name: str) -> Tensor:
            scale = tensors.get(name + SCALE)
            return dequantize(tensors[name].load(), None if scale is None else scale.load())

        reads: dict[str, Callable[[], Tensor]] = {
            name: partial(read, name) for name in tensors if not name.endswith(SCALE)
        }
        return LazyTensors(reads)


def open_head(folder: Path, target: ModelConfig) -> HeadSource:
    """Read the config of the head in a folder."""
    if folder.is_file():
        raise ModelError(f"{folder}: draft heads are read from a folder with config.json and *.safetensors")
    check_weights(folder)
    config = read_json(folder / CONFIG)
    file = HeadFile.of(str(folder), config, decoded_tensors(config, folder_tensors(folder)), target)
    if config.get("format") != FORMAT:
        return HeadSource(str(folder), folder, layout_of(file).config, file, ours=False)
    head = read_head_config(config)
    if (head.vocab, head.target_width) != (target.vocab, target.width) or max(head.hidden_layers) > target.layers:
        raise ModelError(f"{folder}: this head is for {head.target or 'another target'} and does not fit this one")
    return HeadSource(str(folder), folder, head, file, ours=True)


def open_mtp(checkpoint: Checkpoint, target: ModelConfig) -> HeadSource:
    """Read the config of the MTP module in the target's own checkpoint."""
    file = HeadFile.of(str(checkpoint.path), checkpoint.config, dict(checkpoint.tensors()), target)
    module = {name: tensor for name, tensor in file.tensors.items() if is_mtp_tensor(name, file.tensors)}
    file = HeadFile(file.where, file.config, module, target)
    return HeadSource(file.where, None, mtp(file).config, file, ours=False)


def pack_head(head: DraftHead[Any], target: Decoder) -> None:
    """Pack the weights for the kernels, as int8 where that is faster; it hardly changes acceptance."""
    arena = HugePageArena()
    pack = _head_packer(head, arena)
    if not head.config.own_output and head.config.draft_vocab is None and target.shard == head.shard:
        head._modules["output"] = target.head  # already packed, with the same rows
    for module in list(head.modules()):
        if isinstance(module, HeadAttention):
            module.qkv = module.merge_qkv()
        for name, child in list(module._modules.items()):
            if not isinstance(child, Linear) or child.weight is None or child is target.head:
                continue
            if child.outputs > 1:
                module._modules[name] = pack(child)
        if isinstance(module, HeadAttention):
            del module.q  # part of `qkv` now; `kv` is still needed for prefill
    trim_memory()


def _head_packer(head: DraftHead[Any], arena: HugePageArena) -> Callable[[Linear], Linear]:
    device = head.draft_ids.device
    if native_for(device) is not None:
        return partial(quantize_linear, format="int8", arena=arena)
    if device.type == "cuda" and head.is_fusible and find_spec("triton") is not None:
        return partial(
            _quantize_for_cuda, head=head, arena=arena
        )  # by our own kernels alone; torch takes longer to quantize rows
    return partial(_packed, arena=arena)


def _quantize_for_cuda(layer: Linear, head: DraftHead[Any], arena: HugePageArena) -> Linear:
    """Quantize a layer to int8, except a projection of raw hidden states.

    Some of those values are a hundred times larger than the others, and one scale per row would lose the small ones.
    """
    is_raw = layer is getattr(head, "fc", None) and not getattr(head.config, "fc_norm", False)
    return _packed(layer, arena) if is_raw else quantize_linear_cuda(layer, "int8")


def _packed(layer: Linear, arena: HugePageArena) -> Linear:
    layer.pack(arena)
    return layer
