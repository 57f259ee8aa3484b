"""A model small enough to load in a blink, as a folder on disk: for what users do, not for what models say."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAGE = "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore. " * 4
WIDTH, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 32, 2, 4, 2, 48, 128


def write_tiny_folder(path: Path, seed: int = 0) -> Path:
    """A random Llama with a tokenizer, a chat template and generation defaults."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    vocab = tokenizer.get_vocab_size()
    tokenizer.save(str(path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    _write(path / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    _write(path / "generation_config.json", {"eos_token_id": [end], "do_sample": True, "temperature": 0.9, "top_k": 40})
    _write(path / "config.json", _config(vocab))
    save_file(_weights(vocab, seed), str(path / "model.safetensors"))
    return path


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PAGE], trainer)
    return tokenizer


def _config(vocab: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def _weights(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    head = WIDTH // HEADS
    weights = {"model.embed_tokens.weight": torch.randn(vocab, WIDTH) * 0.4, "model.norm.weight": torch.ones(WIDTH)}
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KV_HEADS * head, WIDTH),
        "self_attn.v_proj": (KV_HEADS * head, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * 0.3
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH)
    return weights


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
