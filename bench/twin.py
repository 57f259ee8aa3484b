"""The default model's weights in transformers, without its GGUF reader."""

from __future__ import annotations

from typing import Any

import torch

from foretell.hub import open_checkpoint, resolve
from foretell.models.load import load_model


def transformers_twin(name: str = "smollm2-135m") -> Any:
    """A transformers Llama with the very weights our decoder has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = load_model(open_checkpoint(resolve(name)))
    c = ours.config
    config = LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.width,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0].theta},
        tie_word_embeddings=c.tied,
    )
    theirs = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        theirs.model.embed_tokens.weight.copy_(ours.embed)
        theirs.model.norm.weight.copy_(ours.norm.weight)
        for mine, other in zip(ours.blocks, theirs.model.layers, strict=True):
            _copy_block(mine, other, c.heads * c.head_dim, c.kv_heads * c.head_dim)
    return theirs


def _copy_block(mine: Any, other: Any, queries: int, keys: int) -> None:
    q, k, v = mine.attention.qkv.weight.split([queries, keys, keys])
    gate, up = mine.ffn.gate_up.weight.chunk(2)
    attention, mlp = other.self_attn, other.mlp
    pairs = [
        (attention.q_proj, q),
        (attention.k_proj, k),
        (attention.v_proj, v),
        (attention.o_proj, mine.attention.out.weight),
        (mlp.gate_proj, gate),
        (mlp.up_proj, up),
        (mlp.down_proj, mine.ffn.down.weight),
        (other.input_layernorm, mine.attention_norm.weight),
        (other.post_attention_layernorm, mine.ffn_norm.weight),
    ]
    for module, weight in pairs:
        module.weight.copy_(weight)
