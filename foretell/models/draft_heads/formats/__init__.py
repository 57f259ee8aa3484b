"""Draft heads in formats of other projects, each with its own reader; unknown formats are rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.config import ModelConfig
from foretell.models.draft_heads.base import DraftHead
from foretell.models.draft_heads.config import FORMAT
from foretell.models.draft_heads.formats import assistant, block, eagle, medusa, mtp
from foretell.models.unsupported import ASSISTANTS

from .layout import HeadFile, TensorLayout, fill

if TYPE_CHECKING:
    from foretell.hub.tensor import LazyTensor

__all__ = ["HeadFile", "Layout", "fill", "kind_of", "layout_of", "load_foreign"]

SPECULATORS: dict[str, tuple[str, Callable[[HeadFile], TensorLayout]]] = {
    "eagle3": ("eagle", eagle.speculators),
    "dflash": ("block", block.speculators),
    "dspark": ("block", block.speculators),
    "mtp": ("mtp", mtp.mtp),
}
UNSUPPORTED = {
    "peagle": "P-EAGLE heads draft in parallel with mask tokens",
    "dflash2": "DFlash 2 heads have convolutions",
    "xpress": "XPress heads refine their drafts",
}


def kind_of(config: Mapping[str, Any], names: frozenset[str]) -> str | None:
    """Return the kind of head by config and tensor names; None if there is none."""
    if config.get("format") == FORMAT:
        return str(config.get("kind"))
    found = _rule(config, names)
    return None if found is None else found[0]


def _rule(config: Mapping[str, Any], names: frozenset[str]) -> tuple[str, Callable[[HeadFile], TensorLayout]] | None:
    plain = {name.removeprefix("model.") for name in names}
    model_type = config.get("speculators_model_type")
    if model_type in UNSUPPORTED:
        raise UnsupportedModelError(
            f"{UNSUPPORTED[model_type]}, which is not supported; EAGLE-3, DFlash and DSpark heads are"
        )
    if model_type in SPECULATORS:
        return SPECULATORS[model_type]
    if config.get("model_type") in ASSISTANTS:
        return "assistant", assistant.assistant
    if "dflash_config" in config or "DFlashDraftModel" in (config.get("architectures") or []):
        return "block", block.dflash
    if plain & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} and "fc.weight" in plain:
        return "eagle", eagle.eagle3
    if "fc.weight" in plain and "layers.0.self_attn.q_proj.weight" in plain:
        return "eagle", eagle.eagle1
    if any(medusa.BLOCK.fullmatch(medusa.PREFIX.sub("", n)) or medusa.THEIR_BLOCK.fullmatch(n) for n in plain):
        return "medusa", medusa.medusa
    if {"mtp.fc.weight", "mtp_layers.0.input_proj.weight"} & plain or any(n.endswith(".eh_proj.weight") for n in plain):
        return "mtp", mtp.mtp
    return None


def layout_of(file: HeadFile) -> TensorLayout:
    """Return the layout of a head's file."""
    found = _rule(file.config.values, frozenset(file.tensors))
    if found is None:
        raise ModelError(
            f"{file.where}: not a head in a known format: EAGLE, EAGLE-3, DFlash, DSpark, Medusa, MTP, assistant"
        )
    return found[1](file)


def load_foreign(
    where: str, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], target: ModelConfig
) -> DraftHead[Any]:
    """Load a head in the format of another project."""
    file = HeadFile.of(where, config, tensors, target)
    return fill(layout_of(file), file)
