"""A tiny random model as a folder on disk, for tests of everything but the quality of its output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    width: int = WIDTH
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    ffn: int = FFN
    context: int = CONTEXT
    vocab: int | None = None  # None: the tokenizer's; more leaves ids without a token


def write_tiny_folder(path: Path, seed: int = 0, shape: Shape = Shape(), special: Sequence[str] = ()) -> Path:
    """Write a random Llama with a tokenizer, a chat template and generation defaults; `special`: its tokens, too."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens(list(special))
    vocab = shape.vocab or tokenizer.get_vocab_size()
    tokenizer.save(str(path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    _write(path / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    _write(path / "generation_config.json", {"eos_token_id": [end], "do_sample": True, "temperature": 0.9, "top_k": 40})
    _write(path / "config.json", _config(vocab, shape))
    save_file(_weights(vocab, seed, shape), str(path / "model.safetensors"))
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


def _config(vocab: int, shape: Shape) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def _weights(vocab: int, seed: int, shape: Shape) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    spread = 0.3 * (WIDTH / shape.width) ** 0.5
    width, ffn, kv_width = shape.width, shape.ffn, shape.kv_heads * shape.width // shape.heads
    weights = {"model.embed_tokens.weight": torch.randn(vocab, width) * 0.4, "model.norm.weight": torch.ones(width)}
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    for layer in range(shape.layers):
        for name, sizes in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(sizes) * spread
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(width)
    return weights


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
