"""The commands: where each is defined, its line in the overview, and its examples. Nothing here is imported early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A command of the table: module and attribute of its `Command`, and one line of help."""

    module: str
    attribute: str
    summary: str


# By group of the overview, then by name. Only the module of the given command is imported, which keeps the start fast.
GROUPS: dict[str, dict[str, Entry]] = {
    "run a model": {
        "demo": Entry("demo", "DEMO", "see what speculation gains on this machine"),
        "run": Entry("run", "RUN", "chat with a model, or answer one prompt"),
        "chat": Entry("chat", "CHAT", "chat in the terminal"),
        "generate": Entry("generate", "GENERATE", "answer one prompt"),
        "serve": Entry("serve", "SERVE", "serve a model over HTTP with OpenAI's API"),
        "ps": Entry("ps", "PS", "list running servers"),
        "deploy": Entry("serve", "DEPLOY", "deploy replicas on Ray"),
    },
    "manage models": {
        "pull": Entry("models", "PULL", "download a model"),
        "list": Entry("models", "LIST", "list the models on this machine"),
        "show": Entry("show", "SHOW", "describe a model and the drafters that fit it"),
        "rm": Entry("remove", "RM", "remove a model and its packed weights"),
        "pairs": Entry("pairs", "PAIRS", "list known draft models and heads of a target"),
        "check-pair": Entry("pairs", "CHECK_PAIR", "check whether a draft model works for a target"),
    },
    "measure and tune": {
        "bench": Entry("bench", "BENCH", "measure the speedup of speculation"),
        "certify": Entry("certify", "CERTIFY", "check that speculation does not change the output"),
        "explain": Entry("explain", "EXPLAIN", "show step costs and when speculation pays"),
        "tune": Entry("tune", "TUNE", "find the fastest drafter and settings"),
        "plan": Entry("plan", "PLAN", "estimate speed and memory on other hardware"),
    },
    "train drafters": {
        "train": Entry("train", "TRAIN", "train a drafter for a model"),
        "export": Entry("train", "EXPORT", "export a trained head for vLLM or SGLang"),
    },
}
# `foretell bench` lists these.
BENCHES = {
    "bench offline": Entry("bench_offline", "OFFLINE_BENCH", "compare speculation with plain decoding over a workload"),
    "bench drafters": Entry("bench_offline", "DRAFTERS_BENCH", "compare drafters by task"),
    "bench synthetic": Entry(
        "bench_synthetic", "SYNTHETIC", "measure the engine with a synthetic drafter of a given acceptance rate"
    ),
    "bench never-slower": Entry(
        "bench_never_slower", "NEVER_SLOWER", "test that adaptive drafts are never slower than plain decoding"
    ),
    "bench load": Entry("bench_load", "LOAD", "load-test a server with and without speculation"),
    "bench compare": Entry(
        "bench_compare", "COMPARE", "compare transformers and any OpenAI-compatible server on the same prompts"
    ),
    "bench check": Entry(
        "bench_check", "CHECK", "send a dozen short requests to a server and report whether speculation pays"
    ),
}
HIDDEN = {
    **BENCHES,
    "models": Entry("models", "LIST", "same as list"),
    "plan fleet": Entry("plan", "PLAN_FLEET", "simulate how many replicas a demand needs"),
}
COMMANDS: dict[str, Entry] = {name: entry for group in GROUPS.values() for name, entry in group.items()} | HIDDEN

# Two examples for each page of help, without the program's name.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("run smollm2-135m 'Why is the sky blue?'", "serve smollm2-135m --port 8000"),
    "demo": ("demo", "demo --json --out demo.json"),
    "run": ("run smollm2-135m", "run smollm2-135m 'Why is the sky blue?' --temperature 0.7"),
    "chat": ("chat --system 'Answer in one sentence.'", "chat --url http://127.0.0.1:8000 --temperature 0.7"),
    "generate": ("generate 'Why is the sky blue?' --max-tokens 64", "generate - --json --out answer.json"),
    "serve": (
        "serve Qwen/Qwen3-4B --port 8000 --api-key secret",
        "serve model.gguf --drafter suffix,recycle --max-model-len 8192",
    ),
    "ps": ("ps", "ps --json"),
    "deploy": ("deploy serve.yaml", "deploy serve.yaml --remove"),
    "pull": ("pull smollm2-135m", "pull Qwen/Qwen3-4B --revision main"),
    "list": ("list", "list --json"),
    "models": ("models", "models --supported"),
    "show": ("show smollm2-135m", "show model.gguf --weights"),
    "rm": ("rm gemma3-270m", "rm --packed --yes"),
    "pairs": ("pairs smollm2-135m", "pairs Qwen/Qwen3-8B"),
    "check-pair": (
        "check-pair gemma3-270m smollm2-135m",
        "check-pair Qwen/Qwen3-8B Qwen/Qwen3-0.6B --json",
    ),
    "bench": ("bench offline --quick", "bench check http://127.0.0.1:8000"),
    "bench offline": ("bench offline --quick", "bench offline --drafter ngram --tasks edit,logs --html report.html"),
    "bench drafters": ("bench drafters --quick", "bench drafters --model gemma3-270m --out drafters.json"),
    "bench synthetic": ("bench synthetic --quick", "bench synthetic --acceptance 0.5,0.8 --lengths 2,4 --batch 1,8"),
    "bench never-slower": ("bench never-slower --quick", "bench never-slower --drafters ngram,suffix --out cells.json"),
    "bench load": ("bench load --quick", "bench load --base-url http://127.0.0.1:8000 --seconds 30"),
    "bench compare": (
        "bench compare foretell:plain foretell --quick",
        "bench compare vllm=http://127.0.0.1:8001 foretell --quick",
    ),
    "bench check": ("bench check http://127.0.0.1:8000", "bench check http://127.0.0.1:8000 --api-key secret --json"),
    "certify": ("certify --quick", "certify --drafter ngram --rule rejection --out certificate.json"),
    "explain": ("explain", "explain --model gemma3-270m --drafter model:smollm2-135m"),
    "tune": ("tune --budget 5m", "tune --trace requests.jsonl --out tuned.yaml"),
    "plan": (
        "plan --target llama-3.1-8b --gpu h100 --acceptance 0.7",
        "plan --target llama-3.1-70b --gpu h100 --count 4 --batch 1..64",
    ),
    "plan fleet": (
        "plan fleet --target llama-3.1-8b --gpu l40s --rate 30 --ttft 2",
        "plan fleet --target llama-3.1-8b --gpu h100 --rate 20 --replicas 12",
    ),
    "train": (
        "train eagle --data prompts.jsonl --out my-head",
        "train medusa --data prompts.jsonl --out head --dry-run",
    ),
    **{
        f"train {kind}": (
            f"train {kind} --data prompts.jsonl --out my-{kind} --budget 10m",
            f"train {kind} --from-log log.jsonl --out my-{kind} --dry-run",
        )
        for kind in ("medusa", "eagle", "block", "distill", "streaming")
    },
    "export": (
        "export my-head --format eagle3 --out for-sglang",
        "export my-head --format speculators --out for-vllm",
    ),
}
