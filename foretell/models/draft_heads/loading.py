"""Heads by folder: which kind one holds, what it is made of, and the head itself, ready to serve."""

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
from foretell.hub.checkpoint import Checkpoint
from foretell.hub.folder import CONFIG, folder_tensors, read_json
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads.formats.mtp import mtp
from foretell.models.layers import Linear
from foretell.models.quantize import native_for, quantize_linear, quantize_linear_cuda
from foretell.models.sharding import Shard
from foretell.models.weights import is_mtp_tensor
from foretell.utils.system import give_back

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
    """The folder of the head that comes with the package for a target."""
    folder = SHIPPED / target / kind
    if "/" in target or not folder.is_dir():
        raise RequestError(
            "drafter",
            f"no {kind} comes with the package for {target}; train one with `foretell train {kind} --target {target} "
            f"--out DIR` and name it {kind}:DIR",
        )
    return folder


def head_kind(folder: Path) -> str | None:
    """Which kind of head a folder holds; None where it holds none."""
    if not (folder / CONFIG).is_file():
        return None
    config = read_json(folder / CONFIG)
    if config.get("format") == FORMAT:
        return kind_of(config, frozenset())
    check_weights(folder)
    return kind_of(config, frozenset(folder_tensors(folder)))


def check_weights(folder: Path) -> None:
    """Refuse weights that can run code when they are read."""
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: {pickled[0]} is pickled, which can run code, and is not read; convert it: "
            f"{CONVERT.replace('FILE', pickled[0])}"
        )


@dataclass(frozen=True)
class HeadSource:
    """A head that was looked at and not yet loaded."""

    where: str
    folder: Path | None  # None: the target's own checkpoint
    config: HeadConfig
    file: HeadFile
    ours: bool  # whether this project wrote it: then nothing about it has to be found out

    def bytes(self, shard: Shard | None = None) -> int:
        """What its weights take at most, in float32; those of the first rank, where it is split."""
        with torch.device("meta"):
            return sum(tensor.numel() * 4 for tensor in make_head(self.config, shard).own_state_dict().values())

    def load(
        self, lender: TargetWeights, dtype: torch.dtype, context: int, shard: Shard | None = None
    ) -> DraftHead[Any]:
        """The head with its weights and what it borrows, before a target's own are packed away; or a rank's part."""
        if self.ours:
            head = make_head(self.config, shard)
            fill_head(head, self._own_tensors(), self.where)
        else:
            head = fill(layout_of(self.file), self.file, shard)
        head.to(lender.embed.device, dtype).eval()
        if head.embed is not None and torch.equal(head.embed, lender.embed.to(dtype)):  # many files have the target's
            head.embed, head.config = None, replace(head.config, own_embed=False)
        head.share_weights(lender)
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
    """Look at the head in a folder."""
    check_weights(folder)
    config = read_json(folder / CONFIG)
    file = HeadFile.of(str(folder), config, folder_tensors(folder), target)
    if config.get("format") != FORMAT:
        return HeadSource(str(folder), folder, layout_of(file).config, file, ours=False)
    head = read_head_config(config)
    if (head.vocab, head.target_width) != (target.vocab, target.width) or max(head.hidden_layers) > target.layers:
        raise ModelError(f"{folder}: a head for {head.target or 'another target'}, which does not fit this one")
    return HeadSource(str(folder), folder, head, file, ours=True)


def open_mtp(checkpoint: Checkpoint, target: ModelConfig) -> HeadSource:
    """Look at the module for multi-token prediction in the target's own checkpoint."""
    file = HeadFile.of(str(checkpoint.path), checkpoint.config, dict(checkpoint.tensors()), target)
    module = {name: tensor for name, tensor in file.tensors.items() if is_mtp_tensor(name, file.tensors)}
    file = HeadFile(file.where, file.config, module, target)
    return HeadSource(file.where, None, mtp(file).config, file, ours=False)


def pack_head(head: DraftHead[Any], target: Decoder) -> None:
    """Ready the weights to run: as 8-bit integers, which cost a guess nothing to speak of, where they run faster."""
    room = HugePageArena()
    ready = _head_packer(head, room)
    if not head.config.own_output and head.config.draft_vocab is None and target.shard == head.shard:
        head._modules["output"] = target.head  # ready already, and the same rows
    for module in list(head.modules()):
        if isinstance(module, HeadAttention):
            module.qkv = module.merge_qkv()
        for name, child in list(module._modules.items()):
            if not isinstance(child, Linear) or child.weight is None or child is target.head:
                continue
            if child.outputs > 1:
                module._modules[name] = ready(child)
        if isinstance(module, HeadAttention):
            del module.q  # what it had stands above keys and values now; those are asked for alone, too
    give_back()


def _head_packer(head: DraftHead[Any], room: HugePageArena) -> Callable[[Linear], Linear]:
    device = head.draft_ids.device
    if native_for(device) is not None:
        return partial(quantize_linear, format="int8", arena=room)
    if device.type == "cuda" and head.is_fusible and find_spec("triton") is not None:
        return partial(
            _quantize_for_cuda, head=head, room=room
        )  # by our own kernels alone; torch takes longer to round rows
    return partial(_packed, room=room)


def _quantize_for_cuda(layer: Linear, head: DraftHead[Any], room: HugePageArena) -> Linear:
    """In 8 bits; but not what reads the target's states as they are: some of those numbers are a hundred times the
    others', and a row on one grid would lose the small ones."""
    is_raw = layer is getattr(head, "fc", None) and not getattr(head.config, "fc_norm", False)
    return _packed(layer, room) if is_raw else quantize_linear_cuda(layer, "int8")


def _packed(layer: Linear, room: HugePageArena) -> Linear:
    layer.pack(room)
    return layer
