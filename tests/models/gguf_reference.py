"""transformers' own reading of a GGUF file, without the package its usual way asks for."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def read_gguf(path: Path) -> PreTrainedModel:
    """The model in float32."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):
        sketch = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=sketch)["tensors"]
    model: PreTrainedModel = type(sketch).from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)
    return model.eval()
