"""Which models the fast executors run: the native library on a CPU, Triton kernels on a CUDA device."""

from __future__ import annotations

from foretell.models.config import ModelConfig


def missing_fast_path(config: ModelConfig, device: str, context: int) -> str | None:
    """Return what the fast executor of a device type lacks for a model served with this context; None if nothing.

    Such a model runs in torch, layer by layer, with the same output.
    """
    lacks = {
        "layers of different sizes": bool(config.layer_sizes),
        "softcapping of attention scores": config.attention_softcap is not None,
    }
    if device != "cpu":
        lacks |= {
            "layers without norms before them": not config.pre_norms,
            "norms over all heads": config.full_qk_norm,
            "a multiplier after norms": config.residual_scale != 1 and config.sandwich_norms,
            "queries scaled by position": any(
                rope.query_growth and context > rope.original_context for rope in config.ropes
            ),
        }
    return next((what for what, lacking in lacks.items() if lacking), None)
