"""Launch lines of other engines, the programs' names left out: what each means here, or why it is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.main import main, parse
from foretell.cli.serve import cluster_options, set_download_folder, settings
from foretell.cluster.config import ClusterConfig
from foretell.config import EngineConfig, SpeculationConfig
from foretell.server.compat_flags import CompatFlags
from foretell.server.config import ServerConfig
from foretell.server.foreign_flags import ONLY, OPTIONAL_VALUE, SWITCHES, UNSUPPORTED, WITH_VALUES

WORKS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {
        "Qwen/Qwen3-4B": {"model": "Qwen/Qwen3-4B"},
        "Qwen/Qwen3-4B --tokenizer Qwen/Qwen3-4B": {"model": "Qwen/Qwen3-4B"},
        "Qwen/Qwen3-4B --revision main": {"revision": "main"},
        "Qwen/Qwen3-4B --chat-template chat.jinja": {"chat_template": "chat.jinja"},
        "Qwen/Qwen3-4B --download-dir /models": {"model": "Qwen/Qwen3-4B"},
        "Qwen/Qwen3-4B --generation-config vllm": {"generation_config": "vllm"},
        "Qwen/Qwen3-4B --override-generation-config '{\"temperature\": 0.6}'": {
            "override_generation_config": '{"temperature": 0.6}'
        },
        "Qwen/Qwen3-4B --dtype half -q fp8 --kv-cache-dtype auto": {"dtype": "half", "quantization": "fp8"},
        "Qwen/Qwen3-4B --kv-cache-dtype int8": {"kv_cache_dtype": "int8"},
        "Qwen/Qwen3-4B -tp 2 --pipeline-parallel-size 1 --gpu-memory-utilization 0.85 --max-model-len 8192": {
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.85,
            "max_model_len": 8192,
        },
        "Qwen/Qwen3-4B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3": {
            "tool_call_parser": "hermes",
            "reasoning_parser": "qwen3",
        },
        "Qwen/Qwen3-4B --tool-call-parser llama3_json": {"tool_call_parser": "llama3_json"},
        "Qwen/Qwen3-4B --served-model-name qwen --api-key k --trust-remote-code --enforce-eager": {
            "served_model_name": ("qwen",),
            "api_key": ("k",),
        },
        "Qwen/Qwen3-4B --data-parallel-size 2": {"replicas": 2},
        "Qwen/Qwen3-4B --allowed-origins '[\"https://a.example\"]'": {"cors_origin": ("https://a.example",)},
        'Qwen/Qwen3-4B -sc \'{"method": "ngram", "num_speculative_tokens": 4}\'': {
            "drafter": "ngram",
            "num_speculative_tokens": 4,
        },
        "Qwen/Qwen3-4B --spec-method ngram --spec-tokens 4": {"drafter": "ngram", "num_speculative_tokens": 4},
        "Qwen/Qwen3-4B --spec-method draft_model --spec-model d --spec-tokens 4": {"drafter": "model:d"},
        "Qwen/Qwen3-4B --no-enable-prefix-caching": {"prefix_cache": False},
        "Qwen/Qwen3-4B --task generate --swap-space 4 --block-size 16 --disable-log-requests": {"page_size": 16},
    },
    "sglang": {
        "--model-path Qwen/Qwen3-4B --host 0.0.0.0 --port 30000": {"model": "Qwen/Qwen3-4B", "port": 30000},
        "--model-path Qwen/Qwen3-4B --dp-size 2 --tp-size 2": {"replicas": 2, "tensor_parallel_size": 2},
        "--model-path Qwen/Qwen3-4B --dp 1": {"replicas": None},
        "--model-path Qwen/Qwen3-4B --mem-fraction-static 0.8 --context-length 4096 --random-seed 7": {
            "gpu_memory_utilization": 0.8,
            "max_model_len": 4096,
            "seed": 7,
        },
        "--model-path Qwen/Qwen3-4B --tokenizer-path Qwen/Qwen3-4B --disable-radix-cache": {"prefix_cache": False},
        "--model-path Qwen/Qwen3-4B --attention-backend flashinfer --chunked-prefill-size 4096 --log-level info": {},
        "--model-path Qwen/Qwen3-4B --speculative-algorithm NGRAM --speculative-num-draft-tokens 8": {
            "drafter": "ngram",
            "num_speculative_tokens": 7,
        },
        "--model-path Qwen/Qwen3-4B --reasoning-parser deepseek-r1 --tool-call-parser qwen25": {},
    },
    "llama.cpp": {
        "-m model.gguf -t 2 -tb 2 -c 2048 -np 1": {
            "model": "model.gguf",
            "threads": 2,
            "max_model_len": 2048,
            "max_num_seqs": 1,
        },
        "-m model.gguf -c 0 -np -1 -ngl 99 -fa on": {"max_model_len": None, "max_num_seqs": 64},
        "-m model.gguf --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05 --repeat-penalty 1.1": {
            "override_generation_config": '{"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, '
            '"repetition_penalty": 1.1}'
        },
        "-m model.gguf -b 512 -ub 512": {"max_num_batched_tokens": 512},
        "-hf ggml-org/gemma-3-1b-it-GGUF": {"model": "ggml-org/gemma-3-1b-it-GGUF:latest"},
        "-hf Qwen/Qwen3-4B-GGUF:Q8_0": {"model": "Qwen/Qwen3-4B-GGUF:Q8_0"},
        "-hf Qwen/Qwen3-4B-GGUF -hff Qwen3-4B-Q8_0.gguf": {"model": "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf"},
        "-m model.gguf --jinja --chat-template-file chat.jinja": {"chat_template": "chat.jinja"},
        "-m model.gguf -md draft.gguf --draft-max 16 --draft-min 4 -a name": {
            "drafter": "model:draft.gguf",
            "max_draft": 16,
            "min_draft": 4,
            "served_model_name": ("name",),
        },
        "-m model.gguf --metrics --slots --webui -cb --mlock --no-mmap -ctk f16 -ctv bf16 --verbose": {},
        "-m model.gguf -s 42 --api-key k --host 0.0.0.0 --port 8080": {"seed": 42, "port": 8080},
    },
    "mlx": {
        "--model smollm2-135m --temp 0.7 --top-p 0.9": {
            "model": "smollm2-135m",
            "override_generation_config": '{"temperature": 0.7, "top_p": 0.9}',
        },
        "--model smollm2-135m --draft-model d --num-draft-tokens 3": {
            "drafter": "model:d",
            "num_speculative_tokens": 3,
        },
        "--model smollm2-135m --use-default-chat-template --log-level INFO --prompt-cache-size 10": {},
        "--model smollm2-135m --allowed-origins https://a.example,https://b.example": {
            "cors_origin": ("https://a.example", "https://b.example")
        },
    },
}
REFUSED: dict[str, dict[str, str]] = {
    "vllm": {
        "m --tokenizer other": "tokenizer: is not supported here",
        "m --quantization awq": "'awq' is not supported here",
        "m --enable-lora --lora-modules a=b": "--enable-lora: is not supported here: LoRA",
        "m --limit-mm-per-prompt image=1": "--limit-mm-per-prompt: is not supported here: only text",
        "m --pipeline-parallel-size 2": "--pipeline-parallel-size 2: is not supported here",
        "m --task embed": "--task embed: is not supported here",
        "m --ssl-keyfile k.pem": "TLS proxy",
        "m --hf-token secret": "HF_TOKEN",
        "m --rope-scale 4": "--rope-scaling yarn:FACTOR",
        "m --override-generation-config {": "is not JSON",
        """m --override-generation-config '{"temprature": 1}'""": "did you mean 'temperature'?",
        "m --tool-call-parser pythonic": "hermes",
        "m --kv-cache-dtype fp8": "--kv-cache-dtype: 'fp8' is not known; known: auto",
        "m --disable-fastapi-docs": "/docs",
    },
    "sglang": {"--model-path m --enable-lora": "LoRA", "--model-path m --nnodes 2": "one machine"},
    "llama.cpp": {
        "-m m.gguf --lora a.gguf": "LoRA",
        "-m m.gguf --mmproj p.gguf": "only text",
        "-m m.gguf -n 128": "max_tokens",
        "-m m.gguf --embeddings": "embeddings",
        "-m m.gguf -hff x.gguf": "hf_file: needs --hf-repo",
        "-m m.gguf --mirostat 2": "sampler",
        "-m m.gguf -ctk q8_0": "-ctk q8_0: is not supported here: keys and values",
        "-m m.gguf --no-webui": "proxy",
        "-m m.gguf --no-ui": "proxy",
        "-m m.gguf --log-file server.log": "standard error",
        "-m m.gguf --timeout 60": "--request-timeout",
    },
    "mlx": {"--model m --adapter-path a": "LoRA", "--model m --max-tokens 100": "max_tokens"},
}
LLAMA_CLI = "generate hi -m model.gguf -t 2 --temp 0.7 --top-k 40 --repeat-penalty 1.1 --n-predict 64"
OLLAMA = ("run smollm2-135m", "run smollm2-135m 'Why?'", "list", "ps", "pull smollm2-135m", "show smollm2-135m", "rm x")


def all_lines(table: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(engine, line) for engine, lines in table.items() for line in lines]


@pytest.mark.parametrize(("engine", "line"), all_lines(WORKS))
def test_a_launch_line_means_what_it_does_there(engine: str, line: str) -> None:
    args = parse(["serve", *shlex.split(line)])
    server, config, speculation, _ = settings(args)
    found: dict[str, Any] = {}
    for part in (server, config, speculation, ClusterConfig(**cluster_options(args))):
        found |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    assert {name: found[name] for name in WORKS[engine][line]} == WORKS[engine][line]


@pytest.mark.parametrize(("engine", "line"), all_lines(REFUSED))
def test_or_it_is_refused_with_the_reason(engine: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve", *shlex.split(line), "--port", "0", "--host", "localhost"])
    except SystemExit as leaving:
        code = int(str(leaving.code))
    error = capsys.readouterr().err
    assert code == 2 and REFUSED[engine][line] in error
    assert error.count("\n") == 1 and len(error) < 300 and ("did you mean" in error) == ("temprature" in line)


def test_the_sampling_flags_of_llama_cli_work() -> None:
    args = parse(shlex.split(LLAMA_CLI))
    assert (args.threads, args.temperature, args.top_k, args.repetition_penalty, args.max_tokens) == (
        2,
        0.7,
        40,
        1.1,
        64,
    )


@pytest.mark.parametrize("line", OLLAMA)
def test_ollamas_commands_exist(line: str) -> None:
    assert callable(parse(shlex.split(line)).run)


def test_a_flag_is_in_one_table_only(tmp_path: Path) -> None:
    accepted = [*SWITCHES, *WITH_VALUES, *OPTIONAL_VALUE, *ONLY]
    assert len(set(accepted)) == len(accepted)
    assert not set(accepted) & set(UNSUPPORTED)
    own = {
        flag
        for cls in (ServerConfig, EngineConfig, SpeculationConfig, ClusterConfig, CompatFlags)
        for field in dataclasses.fields(cls)
        for flag in ("--" + field.name.replace("_", "-"), *field.metadata["aliases"])
    }
    assert not own & {*accepted, *UNSUPPORTED}


def test_the_download_folder_is_hugging_faces_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "before")
    args = parse(["serve", "m", "--download-dir", str(tmp_path)])
    set_download_folder(args, ClusterConfig())
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path)


def test_flags_and_json_of_sampling_defaults_are_merged() -> None:
    line = ["serve", "m", "--temp", "0.5", "--override-generation-config", '{"top_k": 3}']
    found = settings(parse(line))[1].override_generation_config
    assert json.loads(found or "") == {"temperature": 0.5, "top_k": 3}
