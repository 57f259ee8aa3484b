"""Flags of vLLM, SGLang, llama.cpp, MLX and Ollama without an equivalent: ignored, or refused with the reason."""

from __future__ import annotations

import argparse
from typing import Any

from foretell.errors import RequestError

# Flags that have no effect here: there is nothing to switch, or it is always on.
SWITCHES = (
    "--async-scheduling",
    "--cont-batching",
    "--context-shift",
    "--delete-ckpt-after-loading",
    "--disable-chunked-prefix-cache",
    "--disable-cuda-graph",
    "--disable-cuda-graph-padding",
    "--disable-custom-all-reduce",
    "--disable-frontend-multiprocessing",
    "--disable-log-requests",
    "--disable-log-stats",
    "--disable-overlap-schedule",
    "--disable-uvicorn-access-log",
    "--enable-auto-tool-choice",
    "--enable-cache-report",
    "--enable-chunked-prefill",
    "--enable-force-include-usage",
    "--enable-log-requests",
    "--enable-metrics",
    "--enable-mixed-chunk",
    "--enable-p2p-check",
    "--enable-prompt-tokens-details",
    "--enable-server-load-tracking",
    "--enable-tokenizer-info-endpoint",
    "--enable-torch-compile",
    "--enforce-eager",
    "--jinja",
    "--kv-unified",
    "--log-disable",
    "--metrics",
    "--mlock",
    "--mmap",
    "--no-cont-batching",
    "--no-context-shift",
    "--no-enable-chunked-prefill",
    "--no-enable-log-requests",
    "--no-jinja",
    "--no-mmap",
    "--no-slots",
    "--no-warmup",
    "--props",
    "--skip-server-warmup",
    "--slots",
    "--speculative-adaptive",
    "--swa-full",
    "--trust-remote-code",
    "--use-default-chat-template",
    "--use-tqdm-on-load",
    "--use-v2-block-manager",
    "--verbose",
    "--webui",
    "-cb",
    "-kvu",
    "-nocb",
    "-v",
)
WITH_VALUES = (
    "--api-server-count",
    "--attention-backend",
    "--cache-reuse",
    "--chat-template-content-format",
    "--chunked-prefill-size",
    "--compilation-config",
    "--config-format",
    "--cuda-graph-bs",
    "--cuda-graph-max-bs",
    "--decode-attention-backend",
    "--decode-concurrency",
    "--decode-log-interval",
    "--device-draft",
    "--distributed-executor-backend",
    "--gpu-layers",
    "--gpu-layers-draft",
    "--grammar-backend",
    "--guided-decoding-backend",
    "--load-format",
    "--log-colors",
    "--log-level",
    "--log-level-http",
    "--log-verbosity",
    "--max-log-len",
    "--max-parallel-loading-workers",
    "--max-prefill-tokens",
    "--max-seq-len-to-capture",
    "--model-impl",
    "--n-gpu-layers",
    "--num-continuous-decode-steps",
    "--num-scheduler-steps",
    "--numa",
    "--optimization-level",
    "--poll",
    "--prefill-attention-backend",
    "--prefill-step-size",
    "--prio",
    "--prompt-cache-bytes",
    "--prompt-cache-size",
    "--prompt-concurrency",
    "--reasoning-format",
    "--repeat-last-n",
    "--response-role",
    "--sampling-backend",
    "--schedule-conservativeness",
    "--schedule-policy",
    "--scheduler-delay-factor",
    "--scheduling-policy",
    "--slot-prompt-similarity",
    "--spec-ngram-min-hits",
    "--stream-interval",
    "--structured-outputs-config",
    "--threads-batch",
    "--threads-batch-draft",
    "--threads-draft",
    "--threads-http",
    "--tokenizer-mode",
    "--tokenizer-worker-num",
    "--ubatch-size",
    "--uvicorn-log-level",
    "--watchdog-timeout",
    "-O",
    "-cc",
    "-cd",
    "-cram",
    "-devd",
    "-lv",
    "-ngl",
    "-ngld",
    "-sps",
    "-tb",
    "-tbd",
    "-td",
    "-ub",
)
OPTIONAL_VALUE = ("--disable-flashinfer", "--flash-attn", "-fa")  # given with or without a value

EXPERTS = "mixtures of experts are not served"
ONE_NODE = "a server runs on one machine; `foretell serve --replicas` uses a Ray cluster"
PIPELINE = "layers are not split over devices; use --tensor-parallel-size"
TASKS = "only text generation is served"
KV_NOT_QUANTIZED = "keys and values have one data type; choose it with --kv-cache-dtype"
KV_TYPES = ("auto", "f16", "bf16", "float16", "bfloat16")  # those that do not quantize the KV cache
# Flags that are accepted with one value, which is how a server works here, by value and reason to refuse others.
ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "--cache-type-k": (KV_TYPES, KV_NOT_QUANTIZED),
    "--cache-type-v": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctk": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctkd": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctv": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctvd": (KV_TYPES, KV_NOT_QUANTIZED),
    "--cpu-offload-gb": (("0",), "weights are not offloaded to the CPU"),
    "--decode-context-parallel-size": (("1",), "the context is not split over devices"),
    "--expert-parallel-size": (("1",), EXPERTS),
    "--ep-size": (("1",), EXPERTS),
    "--nnodes": (("1",), ONE_NODE),
    "--node-rank": (("0",), ONE_NODE),
    "--pipeline-parallel-size": (("1",), PIPELINE),
    "--pp-size": (("1",), PIPELINE),
    "-pp": (("1",), PIPELINE),
    "--runner": (("auto", "generate"), TASKS),
    "--split-mode": (("none", "layer"), "use --tensor-parallel-size"),
    "-sm": (("none", "layer"), "use --tensor-parallel-size"),
    "--task": (("auto", "generate"), TASKS),
}

LORA = "LoRA adapters are not served; merge the adapter into the model"
MULTIMODAL = "only text is served"
ROPE = "RoPE settings are those of the model's config; extend its context with --rope-scaling yarn:FACTOR"
TLS = "the server speaks HTTP; put a TLS proxy in front of it"
EACH_REQUEST = "send it with each request"
SAMPLER = "this sampler does not exist here; use temperature, top_k, top_p and min_p"
OFFLOAD = "a model is on one device, or split with --tensor-parallel-size"
PAGES = "the server always has /docs and its page; let a proxy in front of it hide them"
TIMEOUT = "set how long a request may take with --request-timeout"
TOKEN = "set HF_TOKEN in the environment, where other users cannot see it"
EMBEDDINGS = "embeddings and reranking are not served"
KV_TRANSFER = "KV caches are not shared between servers"
OLLAMA_LOADED = "`foretell serve` keeps a model loaded"
UNSUPPORTED: dict[str, str] = {
    "--adapter-path": LORA,
    "--api-key-file": "give each key with --api-key, or list them in the file of --config",
    "--chat-template-args": "send chat_template_kwargs with each request",
    "--chat-template-kwargs": "send chat_template_kwargs with each request",
    "--completion-template": "use /v1/completions with a complete prompt",
    "--control-vector": "control vectors are not served",
    "--cpu-moe": EXPERTS,
    "-cmoe": EXPERTS,
    "--data-parallel-address": ONE_NODE,
    "--default-chat-template-kwargs": "send chat_template_kwargs with each request",
    "--disable-fastapi-docs": PAGES,
    "--disaggregation-mode": KV_TRANSFER,
    "--dist-init-addr": ONE_NODE,
    "--dry-multiplier": SAMPLER,
    "--dynatemp-range": SAMPLER,
    "--embedding": EMBEDDINGS,
    "--embeddings": EMBEDDINGS,
    "--enable-dp-attention": "attention is split with --tensor-parallel-size",
    "--enable-eplb": EXPERTS,
    "--enable-expert-parallel": EXPERTS,
    "--enable-hierarchical-cache": "KV pages of preempted sequences go to --swap-space",
    "--enable-lora": LORA,
    "--enable-multimodal": MULTIMODAL,
    "--enable-sleep-mode": "a server holds its memory while it runs",
    "--enable-ssl-refresh": TLS,
    "--format": "send response_format to a server, or use SamplingParams(structured_outputs=...)",
    "--grammar": EACH_REQUEST,
    "--grammar-file": EACH_REQUEST,
    "--hf-config-path": "the config is the model's own",
    "--hf-overrides": "the config is the model's own; edit its config.json",
    "--hf-token": TOKEN,
    "-hft": TOKEN,
    "--hidethinking": "a server returns reasoning separately; see --reasoning-parser",
    "--insecure": "downloads are verified",
    "--is-embedding": EMBEDDINGS,
    "--json-model-override-args": "the config is the model's own; edit its config.json",
    "--json-schema": EACH_REQUEST,
    "-j": EACH_REQUEST,
    "--keepalive": OLLAMA_LOADED,
    "--kv-bits": "the KV cache is not quantized",
    "--kv-events-config": KV_TRANSFER,
    "--kv-transfer-config": KV_TRANSFER,
    "--limit-mm-data-per-request": MULTIMODAL,
    "--limit-mm-per-prompt": MULTIMODAL,
    "--log-file": "the log goes to standard error; redirect it with 2> FILE",
    "--logit-bias": EACH_REQUEST,
    "--lora": LORA,
    "--lora-modules": LORA,
    "--lora-paths": LORA,
    "--lora-scaled": LORA,
    "--main-gpu": "name the GPU with --device cuda:N",
    "-mg": "name the GPU with --device cuda:N",
    "--max-cpu-loras": LORA,
    "--max-lora-rank": LORA,
    "--max-loras": LORA,
    "--max-loras-per-batch": LORA,
    "--max-tokens": "set max_tokens in each request",
    "--max-total-tokens": "set the size of the KV cache with --kv-memory",
    "--media-path": MULTIMODAL,
    "--middleware": "put a proxy in front of the server",
    "--mirostat": SAMPLER,
    "--mm-processor-kwargs": MULTIMODAL,
    "--mmproj": MULTIMODAL,
    "-mm": MULTIMODAL,
    "--model-url": "download the file and name it",
    "-mu": "download the file and name it",
    "--n-cpu-moe": EXPERTS,
    "--n-predict": "set max_tokens in each request",
    "--no-kv-offload": OFFLOAD,
    "--no-ui": PAGES,
    "--no-webui": PAGES,
    "--nowordwrap": "lines are not wrapped",
    "--num-gpu-blocks-override": "set the size of the KV cache with --kv-memory",
    "--override-kv": "the config is the model's own",
    "--override-tensor": OFFLOAD,
    "-ot": OFFLOAD,
    "--path": "the page of the server is built in",
    "--pooling": EMBEDDINGS,
    "--predict": "set max_tokens in each request",
    "-n": "set max_tokens in each request",
    "--quantization-param-path": "KV scales are not read",
    "--reasoning-budget": "send thinking_budget with each request",
    "--rerank": EMBEDDINGS,
    "--reranking": EMBEDDINGS,
    "--root-path": "let the proxy in front of the server remove the path",
    "--rope-freq-base": ROPE,
    "--rope-freq-scale": ROPE,
    "--rope-scale": ROPE,
    "--rope-theta": ROPE,
    "--samplers": SAMPLER,
    "--slot-save-path": "the prefix cache is kept in memory",
    "--ssl-ca-certs": TLS,
    "--ssl-cert-file": TLS,
    "--ssl-certfile": TLS,
    "--ssl-key-file": TLS,
    "--ssl-keyfile": TLS,
    "--system-prompt-file": EACH_REQUEST,
    "--timeout": TIMEOUT,
    "-to": TIMEOUT,
    "--tensor-split": OFFLOAD,
    "-ts": OFFLOAD,
    "--think": "reasoning is up to the model's chat template",
    "--tokenizer-revision": "the tokenizer is the model's own",
    "--tool-parser-plugin": "tool parsers are built in; see --tool-call-parser",
    "--top-n-sigma": SAMPLER,
    "--typical": SAMPLER,
    "--xtc-probability": SAMPLER,
    "--yarn-orig-ctx": ROPE,
}


class _IgnoredFlag(argparse.Action):
    """Records a flag that is ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        namespace.ignored_flags = [*getattr(namespace, "ignored_flags", []), flag]


class _OnlyFlag(_IgnoredFlag):
    """Records a flag that is ignored; refuses it with a value that would need support."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        accepted, reason = ONLY[flag or ""]
        if values not in accepted:
            raise RequestError(f"{flag} {values}", f"is not supported here: {reason}")
        super().__call__(parser, namespace, values, flag)


class _RefusedFlag(argparse.Action):
    """Refuses a flag with the reason."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        raise RequestError(flag or "", f"is not supported here: {UNSUPPORTED[flag or '']}")


def add_foreign_flags(parser: argparse._ActionsContainer) -> None:
    """Accept or refuse the flags; `namespace.ignored_flags` lists those that were given and have no effect."""
    settings: dict[str, Any] = {"dest": "ignored_flags", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flags, nargs in ((SWITCHES, 0), (WITH_VALUES, None), (OPTIONAL_VALUE, "?")):
        for flag in flags:
            parser.add_argument(flag, nargs=nargs, action=_IgnoredFlag, **settings)
    for flag in ONLY:
        parser.add_argument(flag, action=_OnlyFlag, **settings)
    for flag in UNSUPPORTED:
        parser.add_argument(flag, nargs="?", action=_RefusedFlag, **settings)
