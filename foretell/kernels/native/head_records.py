"""What the library reads of heads, field for field: `head.h`, `reading.h` and `medusa.cpp` have the same."""

from __future__ import annotations

import ctypes

from .records import NUMBER, POINTER

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


class ChainRecord(ctypes.Structure):
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


class ReaderRecord(ctypes.Structure):
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


class ReadingRecord(ctypes.Structure):
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


class BlockChainRecord(ctypes.Structure):
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


class MedusaRowsRecord(ctypes.Structure):
    """`foretell::MedusaRows`."""

    _fields_ = (
        ("features", POINTER),
        ("logits", POINTER),
        ("guesses", POINTER),
        ("sure", POINTER),
        ("texts", NUMBER),
        ("depth", NUMBER),
    )
