"""Loads damaged copies of a model, one after the other, in a process of its own with limited memory.

`python -m tests.attack.fuzz_files KIND,KIND SEED COUNT FOLDER` prints a line for each outcome that is neither a model
nor one error in one line, and `done` at the end. A crash or a hang shows as an end without it.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from foretell.build.model_source import no_progress, open_model
from foretell.config import EngineConfig
from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import StepCosts
from foretell.engine.cost_profiler import CostProfiler
from foretell.errors import ForetellError

MEMORY = 3 << 30  # bytes of address space beyond what the process has at the start
CPU_SECONDS = 300
INVALID = (0, -1, 1, 2**31, 2**63, 10**30, 1e300, float("nan"), "", "x", None, [], {}, True, [1], {"a": 1})
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(folder: Path, path: Path) -> None:
    """Write the model of a folder as a GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Flip bits, cut, repeat or insert; half of the time near the beginning, where headers are."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        near = min(len(data), 4096 if draw.random() < 0.5 else len(data)) or 1
        at = draw.randrange(near)
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at : at + draw.randrange(64)]
            case 3:
                data[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little")))
            case _:
                del data[at : at + draw.randrange(64)]
    return bytes(data)


def invalid_json(content: bytes, draw: random.Random) -> bytes:
    """Put an invalid value anywhere into a JSON document, or damage its bytes."""
    if draw.random() < 0.3:
        return damaged(content, draw)
    document = json.loads(content)
    for _ in range(draw.choice((1, 1, 3))):
        put_invalid(document, draw)
    return json.dumps(document).encode()


def put_invalid(value: Any, draw: random.Random) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(value[key], dict | list) or draw.random() < 0.3:
            value[key] = deepcopy(draw.choice(INVALID))  # one list in two places could come to contain itself
            return
        value = value[key]


def load(path: Path) -> None:
    """Use everything that a start reads of a model."""
    opened = open_model(str(path), EngineConfig(threads=1, keep_packed=False), no_progress)
    tokens = opened.tokenizer.encode("The quick brown fox 123")
    opened.tokenizer.decode(tokens)
    if opened.tokenizer.chat_template:
        opened.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    opened.load()


def load_costs(path: Path) -> None:
    """Read a file of costs into a controller, which must then know finite costs or none."""
    controller = AdaptiveController({})
    profiler = CostProfiler.__new__(CostProfiler)
    profiler.controller, profiler.file = controller, path
    profiler._all_steps = lambda wanted=None: iter(())  # type: ignore[method-assign,assignment]
    profiler.load()
    seconds = controller.costs.seconds(4, 100, 100)
    assert 0 <= seconds < 1e6, seconds


def learnt_costs() -> bytes:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 10, 0.01, 0)
        costs.observe(4, 10, 0.02, 30)
    return json.dumps({"steps": costs.dump(), "drafts": {"x": {"mean": [1.0], "spread": [[1.0]]}}}).encode()


def attempts(kind: str, folder: Path, seed: int) -> Callable[[int], None]:
    """Return what damages a copy of the model and loads it, by the number of the attempt."""
    path = folder.with_name("damaged")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder, path)
    if kind == "gguf":
        file = target = path / "model.gguf"
        write_gguf(folder, file)
    elif kind == "costs":
        file = target = path / "costs.json"
        file.write_bytes(learnt_costs())
    else:
        file, target = path / kind, path
    whole = file.read_bytes()
    damage = damaged if file.suffix in (".gguf", ".safetensors") else invalid_json
    use = load_costs if kind == "costs" else load
    use(target)  # undamaged

    def attempt(number: int) -> None:
        file.write_bytes(damage(whole, random.Random(f"{kind} {seed} {number}")))
        use(target)

    return attempt


def limit_resources() -> None:
    """Limit memory and processor time of this process."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS,) * 2)


def main(kinds: list[str], seed: int, count: int, folder: Path) -> None:
    limit_resources()
    for kind in kinds:
        try_all(kind, attempts(kind, folder, seed), count)
    print("done", flush=True)


def try_all(kind: str, attempt: Callable[[int], None], count: int) -> None:
    for number in range(count):
        try:
            attempt(number)
        except ForetellError as error:
            if "\n" in str(error) or len(str(error)) > 2000:
                print(f"{kind} {number}: an error with several lines, or a long one: {str(error)[:300]!r}", flush=True)
        except BaseException as error:
            print(f"{kind} {number}: {error!r}"[:500], flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
