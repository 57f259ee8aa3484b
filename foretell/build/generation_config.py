"""Sampling parameters of requests that leave them out: the model's generation config, another one, and overrides."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.config import EngineConfig
from foretell.errors import RequestError
from foretell.hub.checkpoint import GENERATION, Checkpoint, read_generation
from foretell.models.hf_config import sampling_defaults
from foretell.sampling_params import generation_overrides

NO_GENERATION_CONFIG = "vllm"  # vLLM's word for sampling defaults that do not depend on the model


def default_sampling(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling parameters of requests that leave them out, by the config."""
    named = config.generation_config
    if named not in ("auto", NO_GENERATION_CONFIG):
        folder = Path(os.path.expanduser(named))
        if not (folder / GENERATION).is_file():
            raise RequestError("generation_config", f"{named} has no {GENERATION}; use auto, vllm or a folder with one")
        checkpoint = replace(checkpoint, kind="folder", generation=read_generation(folder))
    own = {} if named == NO_GENERATION_CONFIG else sampling_defaults(checkpoint)
    return own | generation_overrides(config.override_generation_config)
