"""Flags of vLLM, SGLang, llama.cpp, MLX and Ollama without an equivalent: ignored, or refused with the reason."""

from __future__ import annotations

import argparse
from typing import Any

from foretell.errors import RequestError

# Flags that have no effect here: there is nothing to switch, or it is always on.
_SWITCHES = """
    --async-scheduling -cb --cont-batching --context-shift --delete-ckpt-after-loading --disable-chunked-prefix-cache
    --disable-cuda-graph --disable-cuda-graph-padding --disable-custom-all-reduce --disable-frontend-multiprocessing
    --disable-log-requests --disable-log-stats --disable-overlap-schedule --disable-uvicorn-access-log
    --enable-auto-tool-choice --enable-cache-report --enable-chunked-prefill --enable-force-include-usage
    --enable-log-requests --enable-metrics --enable-mixed-chunk --enable-p2p-check --enable-prompt-tokens-details
    --enable-server-load-tracking --enable-tokenizer-info-endpoint --enable-torch-compile --enforce-eager --jinja
    --kv-unified -kvu --log-disable --metrics --mlock --mmap --no-cont-batching --no-context-shift
    --no-enable-chunked-prefill --no-enable-log-requests --no-jinja --no-mmap --no-slots --no-warmup -nocb --props
    --skip-server-warmup --slots --spec-default --spec-draft-backend-sampling --speculative-adaptive --swa-full
    --trust-remote-code --use-default-chat-template --use-tqdm-on-load --use-v2-block-manager -v --verbose --webui
"""
_WITH_VALUES = """
    --api-server-count --attention-backend --cache-reuse -cc -cd --chat-template-content-format --chunked-prefill-size
    --compilation-config --config-format -cram --cuda-graph-bs --cuda-graph-max-bs --decode-attention-backend
    --decode-concurrency --decode-log-interval --distributed-executor-backend --gpu-layers --gpu-layers-draft
    --grammar-backend --guided-decoding-backend --load-format --log-colors --log-level --log-level-http --log-verbosity
    -lv --max-log-len --max-parallel-loading-workers --max-prefill-tokens --max-seq-len-to-capture --model-impl
    --n-gpu-layers --n-gpu-layers-draft -ngl -ngld --num-continuous-decode-steps --num-scheduler-steps --numa -O
    --optimization-level --poll --poll-batch --poll-batch-draft --poll-draft --prefill-attention-backend
    --prefill-step-size --prio --prio-batch --prio-batch-draft --prio-draft --prompt-cache-bytes --prompt-cache-size
    --prompt-concurrency --reasoning-format --repeat-last-n --response-role --sampling-backend
    --schedule-conservativeness --schedule-policy --scheduler-delay-factor --scheduling-policy --slot-prompt-similarity
    --spec-draft-ngl --spec-draft-poll --spec-draft-poll-batch --spec-draft-prio --spec-draft-prio-batch
    --spec-draft-threads --spec-draft-threads-batch --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-min-hits
    --spec-ngram-min-hits --spec-ngram-simple-min-hits --speculative-attention-mode
    --speculative-draft-attention-backend --speculative-draft-load-format --speculative-dsa-topk-backend
    --speculative-ngram-capacity -sps --stream-interval --structured-outputs-config -tb -tbd -td --threads-batch
    --threads-batch-draft --threads-draft --threads-http --tokenizer-mode --tokenizer-worker-num -ub --ubatch-size
    --uvicorn-log-level --watchdog-timeout
"""
SWITCHES, WITH_VALUES = tuple(_SWITCHES.split()), tuple(_WITH_VALUES.split())
OPTIONAL_VALUE = ("--disable-flashinfer", "--flash-attn", "-fa")  # given with or without a value

EXPERTS = "mixtures of experts are not served"
ONE_NODE = "a server runs on one machine; `foretell serve --replicas` uses a Ray cluster"
PIPELINE = "layers are not split over devices; use --tensor-parallel-size"
TASKS = "only text generation is served"
KV_NOT_QUANTIZED = "keys and values have one data type; choose it with --kv-cache-dtype"
LOSSY = "drafts are verified exactly; a lossy rule is --rule typical or confidence"
KV_TYPES = ("auto", "f16", "bf16", "float16", "bfloat16")  # those that do not quantize the KV cache
EXACT = ("1", "1.0")  # thresholds of acceptance that change nothing
# Flags that are accepted with one value, which is how a server works here, by value and reason to refuse others.
ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "--cache-type-k": (KV_TYPES, KV_NOT_QUANTIZED),
    "--cache-type-k-draft": (KV_TYPES, KV_NOT_QUANTIZED),
    "--cache-type-v": (KV_TYPES, KV_NOT_QUANTIZED),
    "--cache-type-v-draft": (KV_TYPES, KV_NOT_QUANTIZED),
    "--cpu-offload-gb": (("0",), "weights are not offloaded to the CPU"),
    "-ctk": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctkd": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctv": (KV_TYPES, KV_NOT_QUANTIZED),
    "-ctvd": (KV_TYPES, KV_NOT_QUANTIZED),
    "--decode-context-parallel-size": (("1",), "the context is not split over devices"),
    "--ep-size": (("1",), EXPERTS),
    "--expert-parallel-size": (("1",), EXPERTS),
    "--nnodes": (("1",), ONE_NODE),
    "--node-rank": (("0",), ONE_NODE),
    "--pipeline-parallel-size": (("1",), PIPELINE),
    "-pp": (("1",), PIPELINE),
    "--pp-size": (("1",), PIPELINE),
    "--runner": (("auto", "generate"), TASKS),
    "-sm": (("none", "layer"), "use --tensor-parallel-size"),
    "--spec-draft-type-k": (KV_TYPES, KV_NOT_QUANTIZED),
    "--spec-draft-type-v": (KV_TYPES, KV_NOT_QUANTIZED),
    "--speculative-accept-threshold-acc": (EXACT, LOSSY),
    "--speculative-accept-threshold-single": (EXACT, LOSSY),
    "--speculative-draft-kv-cache-dtype": (KV_TYPES, KV_NOT_QUANTIZED),
    "--split-mode": (("none", "layer"), "use --tensor-parallel-size"),
    "--task": (("auto", "generate"), TASKS),
}

# Flags that are refused, by reason.
REFUSED = {
    "LoRA adapters are not served; merge the adapter into the model": (
        "--adapter-path --enable-lora --lora --lora-modules --lora-paths --lora-scaled --max-cpu-loras "
        "--max-lora-rank --max-loras --max-loras-per-batch --uno-lora-path"
    ),
    "give each key with --api-key, or list them in the file of --config": "--api-key-file",
    "set the number of cores with --threads, or restrict the process with taskset": (
        "-C -Cb -Cd --cpu-mask --cpu-mask-batch --cpu-mask-draft --cpu-range --cpu-range-batch --cpu-range-draft "
        "--cpu-strict --cpu-strict-batch --cpu-strict-draft -Cr -Crb -Crd --spec-draft-cpu-mask "
        "--spec-draft-cpu-mask-batch --spec-draft-cpu-range --spec-draft-cpu-range-batch --spec-draft-cpu-strict "
        "--spec-draft-cpu-strict-batch"
    ),
    "send chat_template_kwargs with each request": (
        "--chat-template-args --chat-template-kwargs --default-chat-template-kwargs"
    ),
    EXPERTS: (
        "-cmoe -cmoed --cpu-moe --cpu-moe-draft --enable-eplb --enable-expert-parallel --n-cpu-moe "
        "--n-cpu-moe-draft -ncmoe -ncmoed --spec-draft-cpu-moe --spec-draft-n-cpu-moe "
        "--speculative-enable-w4a4-mxfp4-megamoe --speculative-moe-a2a-backend --speculative-moe-runner-backend"
    ),
    "use /v1/completions with a complete prompt": "--completion-template",
    "control vectors are not served": "--control-vector",
    ONE_NODE: "--data-parallel-address --dist-init-addr",
    "name the device of the draft model with --draft-device cpu or cuda:N": "-devd --device-draft --spec-draft-device",
    "the server always has /docs and its page; let a proxy in front of it hide them": (
        "--disable-fastapi-docs --no-ui --no-webui"
    ),
    "KV caches are not shared between servers": "--disaggregation-mode --kv-events-config --kv-transfer-config",
    "this sampler does not exist here; use temperature, top_k, top_p and min_p": (
        "--dry-multiplier --dynatemp-range --mirostat --samplers --top-n-sigma --typical --xtc-probability"
    ),
    "embeddings and reranking are not served": "--embedding --embeddings --is-embedding --pooling --rerank --reranking",
    "attention is split with --tensor-parallel-size": "--enable-dp-attention --enable-dp-lm-head",
    "KV pages of preempted sequences go to --swap-space": "--enable-hierarchical-cache",
    "a draft head is what its checkpoint says; limit drafts with --max-draft": (
        "--enable-multi-layer-eagle --speculative-dflash-block-size --speculative-dspark-block-size"
    ),
    "only text is served": (
        "--enable-multimodal --limit-mm-data-per-request --limit-mm-per-prompt --media-path -mm "
        "--mm-processor-kwargs --mmproj"
    ),
    "a server holds its memory while it runs": "--enable-sleep-mode",
    "the server speaks HTTP; put a TLS proxy in front of it": (
        "--enable-ssl-refresh --ssl-ca-certs --ssl-cert-file --ssl-certfile --ssl-key-file --ssl-keyfile"
    ),
    "send response_format to a server, or use SamplingParams(structured_outputs=...)": "--format",
    "send it with each request": "--grammar --grammar-file -j --json-schema --logit-bias --system-prompt-file",
    "the config is the model's own": "--hf-config-path --override-kv",
    "the config is the model's own; edit its config.json": "--hf-overrides --json-model-override-args",
    "set HF_TOKEN in the environment, where other users cannot see it": "--hf-token -hft",
    "a server returns reasoning separately; see --reasoning-parser": "--hidethinking",
    "downloads are verified": "--insecure",
    "`foretell serve` keeps a model loaded": "--keepalive",
    KV_NOT_QUANTIZED: "--kv-bits",
    "the log goes to standard error; redirect it with 2> FILE": "--log-file",
    "name the GPU with --device cuda:N": "--main-gpu -mg",
    "set max_tokens in each request": "--max-tokens -n --n-predict --predict",
    "set the size of the KV cache with --kv-memory": "--max-total-tokens --num-gpu-blocks-override",
    "put a proxy in front of the server": "--middleware",
    "download the file and name it": "--model-url -mu",
    "a model is on one device, or split with --tensor-parallel-size": (
        "--no-kv-offload -ot -otd --override-tensor --override-tensor-draft --spec-draft-override-tensor "
        "--tensor-split -ts"
    ),
    "lines are not wrapped": "--nowordwrap",
    "the page of the server is built in": "--path",
    "KV scales are not read": "--quantization-param-path",
    "send thinking_budget with each request": "--reasoning-budget",
    "let the proxy in front of the server remove the path": "--root-path",
    "RoPE settings are those of the model's config; extend its context with --rope-scaling yarn:FACTOR": (
        "--rope-freq-base --rope-freq-scale --rope-scale --rope-theta --yarn-orig-ctx"
    ),
    "the prefix cache is kept in memory": "--slot-save-path",
    "stop a draft model by its own probabilities with --min-confidence": "--spec-draft-conf-min",
    "the controller chooses the shape of a draft; limit it with --max-draft and --tree-nodes": (
        "--spec-draft-p-split --speculative-ngram-match-type --speculative-ngram-max-bfs-breadth "
        "--speculative-ngram-min-bfs-breadth"
    ),
    "acceptance is real in a server; `foretell bench synthetic` measures with a given one": (
        "--spec-synth-len --spec-synth-rates"
    ),
    "record requests with --log-requests FILE": "--spec-trace-dir",
    "draft lengths follow costs and acceptance measured while serving; limit them with --max-draft": (
        "--speculative-adaptive-config --speculative-dspark-align-verify-tokens-to-graph-tier "
        "--speculative-dspark-confidence-sts-path --speculative-dspark-sps-table-path"
    ),
    "Domino heads are not served": "--speculative-domino-candidate-pool-size",
    "a draft model runs as --quantization says for the target": "--speculative-draft-model-quantization",
    "a draft model attends to what its config says": "--speculative-draft-sink-size --speculative-draft-window-size",
    "draft from files with --draft-corpus FOLDER, limited by --draft-corpus-memory": (
        "--speculative-ngram-external-corpus-max-tokens --speculative-ngram-external-corpus-path "
        "--speculative-ngram-external-sam-budget"
    ),
    "set the longest n-gram with --prompt-lookup-max": "--speculative-ngram-max-trie-depth",
    "a draft head has the vocabulary of its checkpoint": "--speculative-token-map",
    "reasoning is up to the model's chat template": "--think",
    "set how long a request may take with --request-timeout": "--timeout -to",
    "the tokenizer is the model's own": "--tokenizer-revision",
    "tool parsers are built in; see --tool-call-parser": "--tool-parser-plugin",
}
UNSUPPORTED = {flag: reason for reason, flags in REFUSED.items() for flag in flags.split()}


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
