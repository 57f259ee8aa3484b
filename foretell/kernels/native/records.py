"""What the library reads, field for field: `kernels.h` and `step.h` have the same."""

from __future__ import annotations

import ctypes
from array import array

from foretell.kernels.bounds import require

NUMBER, POINTER = ctypes.c_int64, ctypes.c_void_p
ALL_REDUCE = ctypes.CFUNCTYPE(ctypes.c_bool, POINTER, NUMBER)  # `foretell::Join`


class WeightsRecord(ctypes.Structure):
    """`foretell::Weights`."""

    _fields_ = (
        ("inputs", NUMBER),
        ("outputs", NUMBER),
        ("packed", POINTER),
        ("scales", POINTER),
        ("bias", POINTER),
        ("bits", ctypes.c_int32),
        ("level", ctypes.c_int32),
    )


class LayerRecord(ctypes.Structure):
    """`foretell::Layer`."""

    _fields_ = (
        ("qkv", POINTER),
        ("out", POINTER),
        ("gate_up", POINTER),
        ("down", POINTER),
        ("attention_norm", POINTER),
        ("ffn_norm", POINTER),
        ("q_norm", POINTER),
        ("k_norm", POINTER),
        ("attention_post_norm", POINTER),
        ("ffn_post_norm", POINTER),
        ("turns", POINTER),
        ("keys", POINTER),
        ("values", POINTER),
        ("window", NUMBER),
    )


class ModelRecord(ctypes.Structure):
    """`foretell::Model`."""

    _fields_ = (
        ("layers", POINTER),
        ("head", POINTER),
        ("embed", POINTER),
        ("norm", POINTER),
        ("layer_count", NUMBER),
        ("width", NUMBER),
        ("heads", NUMBER),
        ("kv_heads", NUMBER),
        ("head_dim", NUMBER),
        ("ffn", NUMBER),
        ("page_size", NUMBER),
        ("first_token", NUMBER),
        ("tokens", NUMBER),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embed_scale", ctypes.c_float),
        ("gelu", ctypes.c_int32),
        ("level", ctypes.c_int32),
    )


class StepRecord(ctypes.Structure):
    """`foretell::Step`."""

    _fields_ = (
        ("tokens", POINTER),
        ("positions", POINTER),
        ("slots", POINTER),
        ("spans", POINTER),
        ("pages", POINTER),
        ("parents", POINTER),
        ("wanted", POINTER),
        ("taps", POINTER),
        ("logits", POINTER),
        ("features", POINTER),
        ("likeliest", POINTER),
        ("rows", NUMBER),
        ("span_count", NUMBER),
        ("wanted_count", NUMBER),
        ("tap_count", NUMBER),
        ("join", ALL_REDUCE),
    )


def pack_record(kind: type[ctypes.Structure], *fields: int | None) -> array[int]:
    """A record of addresses and whole numbers alone, as such: where one is made in every step, ctypes takes long."""
    require(len(fields) == len(kind._fields_), "a value for each field of the record")
    return array("q", [field or 0 for field in fields])


FLAG, FLOAT = ctypes.c_int32, ctypes.c_float


class HeadRecord(ctypes.Structure):
    """`foretell::Head`."""

    _fields_ = (
        ("layers", POINTER),
        ("join", POINTER),
        ("output", POINTER),
        ("embed", POINTER),
        ("embed_norm", POINTER),
        ("feature_norm", POINTER),
        ("norm", POINTER),
        ("ids", POINTER),
        ("layer_count", NUMBER),
        ("width", NUMBER),
        ("heads", NUMBER),
        ("kv_heads", NUMBER),
        ("head_dim", NUMBER),
        ("ffn", NUMBER),
        ("page_size", NUMBER),
        ("eps", FLOAT),
        ("scale", FLOAT),
        ("embed_scale", FLOAT),
        ("gelu", FLAG),
        ("level", FLAG),
        ("side_by_side", FLAG),
        ("residual", FLAG),
        ("norm_output", FLAG),
    )


class DraftChainRecord(ctypes.Structure):
    """`foretell::Chain`."""

    _fields_ = (
        ("tokens", POINTER),
        ("places", POINTER),
        ("pages", POINTER),
        ("first_pages", POINTER),
        ("depths", POINTER),
        ("floors", POINTER),
        ("features", POINTER),
        ("logits", POINTER),
        ("guesses", POINTER),
        ("sure", POINTER),
        ("rows", NUMBER),
        ("depth", NUMBER),
        ("branches", POINTER),
        ("branch", NUMBER),
        ("draws", POINTER),
        ("probs", POINTER),
        ("vocab", NUMBER),
        ("along", POINTER),
    )


class PrefillHeadRecord(ctypes.Structure):
    """`foretell::Reader`."""

    _fields_ = (
        ("head", HeadRecord),
        ("keeps", POINTER),
        ("fuse", POINTER),
        ("target_norm", POINTER),
        ("tap_norms", POINTER),
        ("all_norm", POINTER),
        ("fused_norm", POINTER),
        ("features", POINTER),
        ("columns", POINTER),
        ("taps", NUMBER),
        ("target_width", NUMBER),
        ("target_eps", FLOAT),
        ("pairs", FLAG),
    )


class HeadPrefillRecord(ctypes.Structure):
    """`foretell::Reading`."""

    _fields_ = (
        ("states", POINTER),
        ("slots", POINTER),
        ("places", POINTER),
        ("tokens", POINTER),
        ("before", POINTER),
        ("own", POINTER),
        ("at", POINTER),
        ("pages", POINTER),
        ("first_pages", POINTER),
        ("texts", POINTER),
        ("rows", NUMBER),
        ("pair_count", NUMBER),
    )


class BlockHeadRecord(ctypes.Structure):
    """`foretell::BlockHead`."""

    _fields_ = (
        ("head", HeadRecord),
        ("masks", POINTER),
        ("markov_in", POINTER),
        ("markov_out", POINTER),
        ("surety", POINTER),
        ("surety_bias", FLOAT),
        ("surety_rank", FLAG),
        ("rank", NUMBER),
        ("rows", NUMBER),
        ("from_anchor", FLAG),
        ("causal", FLAG),
        ("anchored", FLAG),
        ("spare", NUMBER),
    )


class BlockDraftRecord(ctypes.Structure):
    """`foretell::BlockChain`."""

    _fields_ = (
        ("tokens", POINTER),
        ("places", POINTER),
        ("pages", POINTER),
        ("first_pages", POINTER),
        ("depths", POINTER),
        ("floors", POINTER),
        ("states", POINTER),
        ("logits", POINTER),
        ("guesses", POINTER),
        ("sure", POINTER),
        ("texts", NUMBER),
        ("depth", NUMBER),
    )


class MedusaRecord(ctypes.Structure):
    """`foretell::Medusa`."""

    _fields_ = (
        ("blocks", POINTER),
        ("outputs", POINTER),
        ("norm", POINTER),
        ("ids", POINTER),
        ("layers", NUMBER),
        ("width", NUMBER),
        ("eps", FLOAT),
        ("level", FLAG),
        ("shared", FLAG),
    )


class MedusaDraftRecord(ctypes.Structure):
    """`foretell::MedusaRows`."""

    _fields_ = (
        ("features", POINTER),
        ("logits", POINTER),
        ("guesses", POINTER),
        ("sure", POINTER),
        ("texts", NUMBER),
        ("depth", NUMBER),
    )
