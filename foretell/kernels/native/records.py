"""Structs of the native library, with the fields of `kernels.h`, `step.h`, `head.h`, `head_prefill.h`, `medusa.cpp`."""

from __future__ import annotations

import ctypes
from array import array

from foretell.kernels.bounds import require

NUMBER, POINTER = ctypes.c_int64, ctypes.c_void_p
FLAG, FLOAT = ctypes.c_int32, ctypes.c_float
ALL_REDUCE = ctypes.CFUNCTYPE(ctypes.c_bool, POINTER, NUMBER)  # `foretell::AllReduce`


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
        ("rope_table", POINTER),
        ("keys", POINTER),
        ("values", POINTER),
        ("window", NUMBER),
        ("query_scales", POINTER),
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
        ("full_qk_norm", NUMBER),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embed_scale", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
        ("gelu", ctypes.c_int32),
        ("level", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
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
        ("logit_rows", POINTER),
        ("hidden_layers", POINTER),
        ("logits", POINTER),
        ("hidden_states", POINTER),
        ("argmax", POINTER),
        ("rows", NUMBER),
        ("span_count", NUMBER),
        ("logit_row_count", NUMBER),
        ("hidden_layer_count", NUMBER),
        ("all_reduce", ALL_REDUCE),
    )


def pack_record(kind: type[ctypes.Structure], *fields: int | None) -> array[int]:
    """Return the memory of a record that has only addresses and 64-bit integers. ctypes is too slow for every step."""
    require(len(fields) == len(kind._fields_), "a value for each field of the record")
    return array("q", [field or 0 for field in fields])


class HeadRecord(ctypes.Structure):
    """`foretell::Head`."""

    _fields_ = (
        ("layers", POINTER),
        ("fc", POINTER),
        ("output", POINTER),
        ("embed", POINTER),
        ("embed_norm", POINTER),
        ("hidden_norm", POINTER),
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
        ("concat_inputs", FLAG),
        ("residual", FLAG),
        ("norm_output", FLAG),
        ("kv_type", FLAG),
    )


class DraftChainRecord(ctypes.Structure):
    """`foretell::DraftChain`."""

    _fields_ = (
        ("tokens", POINTER),
        ("positions", POINTER),
        ("pages", POINTER),
        ("first_pages", POINTER),
        ("depths", POINTER),
        ("min_probs", POINTER),
        ("hidden_states", POINTER),
        ("logits", POINTER),
        ("draft_tokens", POINTER),
        ("confidences", POINTER),
        ("rows", NUMBER),
        ("depth", NUMBER),
        ("tree_slots", POINTER),
        ("tree_slot_count", NUMBER),
        ("sampling", POINTER),
        ("probs", POINTER),
        ("vocab", NUMBER),
        ("prefill", POINTER),
    )


class PrefillHeadRecord(ctypes.Structure):
    """`foretell::PrefillHead`."""

    _fields_ = (
        ("head", HeadRecord),
        ("kv_weights", POINTER),
        ("fc_weights", POINTER),
        ("target_norm", POINTER),
        ("hidden_layer_norms", POINTER),
        ("concat_norm", POINTER),
        ("projected_norm", POINTER),
        ("hidden_states", POINTER),
        ("column_offsets", POINTER),
        ("num_hidden_layers", NUMBER),
        ("target_width", NUMBER),
        ("target_eps", FLOAT),
        ("pairs", FLAG),
    )


class HeadPrefillRecord(ctypes.Structure):
    """`foretell::HeadPrefill`."""

    _fields_ = (
        ("target_states", POINTER),
        ("slots", POINTER),
        ("positions", POINTER),
        ("tokens", POINTER),
        ("source_slots", POINTER),
        ("pair_slots", POINTER),
        ("pair_positions", POINTER),
        ("pages", POINTER),
        ("first_pages", POINTER),
        ("sequence_of", POINTER),
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
        ("confidence", POINTER),
        ("confidence_bias", FLOAT),
        ("confidence_rank", FLAG),
        ("rank", NUMBER),
        ("rows", NUMBER),
        ("from_anchor", FLAG),
        ("causal", FLAG),
        ("anchored", FLAG),
        ("scratch_slots", NUMBER),
    )


class BlockDraftRecord(ctypes.Structure):
    """`foretell::BlockDraft`."""

    _fields_ = (
        ("tokens", POINTER),
        ("positions", POINTER),
        ("pages", POINTER),
        ("first_pages", POINTER),
        ("depths", POINTER),
        ("min_probs", POINTER),
        ("states", POINTER),
        ("logits", POINTER),
        ("draft_tokens", POINTER),
        ("confidences", POINTER),
        ("sequences", NUMBER),
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
    """`foretell::MedusaDraft`."""

    _fields_ = (
        ("hidden_states", POINTER),
        ("logits", POINTER),
        ("draft_tokens", POINTER),
        ("confidences", POINTER),
        ("sequences", NUMBER),
        ("depth", NUMBER),
    )
