"""Decoders made from a decoder: cheaper ways to run the same weights, as drafts."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from .decoder import Decoder


def first_layers(model: Decoder, layers: int) -> Decoder:
    """The first `layers` of a decoder with its final norm and head; nothing is copied."""
    early = copy.copy(model)
    early._modules = dict(model._modules)
    early.blocks = nn.ModuleList(list(model.blocks)[:layers])
    early.config = replace(
        model.config, layers=layers, ropes=model.config.ropes[:layers], windows=model.config.windows[:layers]
    )
    return early
