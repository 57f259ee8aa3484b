"""RoPE scaling that the user asks for, to run a model beyond the context it was trained for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from foretell.errors import RequestError
from foretell.models.config import ModelConfig, Rope

FIELD = "rope_scaling"
KINDS: dict[str, Literal["linear", "yarn"]] = {"linear": "linear", "yarn": "yarn"}
MAX_FACTOR = 64.0
EXAMPLE = "use linear:FACTOR or yarn:FACTOR, such as yarn:4"


def scaled_config(config: ModelConfig, wanted: str) -> ModelConfig:
    """Return the config with its context, and the RoPE of its full-attention layers, scaled."""
    kind, factor = read_scaling(wanted)
    full = {rope for rope, window in zip(config.ropes, config.windows, strict=True) if window is None}
    for rope in full:
        if rope.kind != "default" or rope.factors:
            raise RequestError(FIELD, "the model's own RoPE is scaled already; leave the option out")
    ropes = tuple(
        _scaled(rope, kind, factor, config.context) if window is None else rope
        for rope, window in zip(config.ropes, config.windows, strict=True)
    )
    return replace(config, ropes=ropes, context=int(config.context * factor))


def _scaled(rope: Rope, kind: Literal["linear", "yarn"], factor: float, context: int) -> Rope:
    return replace(rope, kind=kind, factor=factor, original_context=context)


def read_scaling(wanted: str) -> tuple[Literal["linear", "yarn"], float]:
    """Return kind and factor of a scaling given as KIND:FACTOR or as vLLM's JSON."""
    name, factor = _json_scaling(wanted) if wanted.lstrip().startswith("{") else wanted.partition(":")[::2]
    if name == "dynamic":
        raise RequestError(FIELD, f"dynamic would need another KV cache with every token; {EXAMPLE}")
    if name not in KINDS:
        raise RequestError(FIELD, f"{wanted!r} is not supported; {EXAMPLE}")
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = 0.0
    if not 1 < number <= MAX_FACTOR:
        raise RequestError(FIELD, f"the factor must be above 1 and at most {MAX_FACTOR:g}, not {factor!r}; {EXAMPLE}")
    return KINDS[name], number


def _json_scaling(wanted: str) -> tuple[Any, Any]:
    try:
        given = json.loads(wanted)
    except ValueError:
        return wanted, None
    unknown = set(given) - {"rope_type", "type", "factor"}
    if unknown:
        raise RequestError(FIELD, f"{min(unknown)} cannot be set; {EXAMPLE}")
    return given.get("rope_type", given.get("type")), given.get("factor")
