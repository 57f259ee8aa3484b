"""Decoding on this CPU against llama.cpp, OpenVINO GenAI and transformers, in one run:

    python bench/peers.py --llama FOLDER --gguf MODEL.gguf [--openvino FOLDER --openvino-python PYTHON] [--transformers]
    python bench/peers.py --llama FOLDER --synthetic FOLDER --llama-source CHECKOUT

FOLDER holds llama-server and llama-quantize, built with native flags; MODEL.gguf is the file our default model is in;
the OpenVINO folder is an int8 export of the same weights. `--synthetic` makes a model of 1.1 billion weights and its
draft model in a folder (SmolLM2-135M widened so that it costs what a 1.1B model costs) and converts them with the
checkout's converter. Every setting is a server (or a child process) that waits
while it is not asked; they take turns on each prompt, and each is timed by its own clock from the first token on.
Two more tables: a prompt of 512 tokens, and a batch of eight requests (`peer_loads.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import geometric_mean, median

import peer_loads
from peer_loads import post
from peer_models import Subject, synthetic

from foretell import LLM
from foretell.bench.machine import describe_host
from foretell.bench.workloads import load, select
from foretell.tokenizer import Tokenizer

KINDS = {
    "chat": "chat",
    "edit": "rewrite code",
    "summary": "summarise",
    "extraction": "JSON",
    "story": "story",
    "math": "math",
}
NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "10")
DRAFT_MODEL = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")
EIGHT_BITS = "Q8_0"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Answer:
    """A text and how fast it came, tokens a second after the first."""

    text: str
    tokens: int
    speed: float


Ask = Callable[[str], Answer]


@contextmanager
def server(command: list[str], port: int, path: str = "/health") -> Iterator[None]:
    """A server that is up, and is gone afterwards."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            for _ in range(480):
                if process.poll() is not None:
                    said.seek(0)
                    raise SystemExit(f"{' '.join(command)} ended:\n{said.read().decode()[-600:]}")
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                        break
                except OSError:
                    time.sleep(0.25)
            yield
        finally:
            process.terminate()
            process.wait(20)


def llama(port: int, tokens: int) -> Ask:
    def ask(prompt: str) -> Answer:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "top_k": 1, "cache_prompt": False}
        found = post(port, "/completion", body)
        return Answer(found["content"], found["timings"]["predicted_n"], found["timings"]["predicted_per_second"])

    return ask


def ours(port: int, tokens: int, speculative: bool) -> Ask:
    asked = iter(range(1 << 30))

    def ask(prompt: str) -> Answer:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        # A salt of its own for every request of every variant: else one would replay what another generated.
        body |= {"cache_salt": f"{port} {speculative} {next(asked)}"} | ({} if speculative else {"speculative": False})
        found = post(port, "/v1/completions", body)
        timings = found["timings"]
        return Answer(found["choices"][0]["text"], timings["predicted_n"], timings["predicted_per_second"])

    return ask


@contextmanager
def child(command: list[str], tokenizer: Tokenizer) -> Iterator[Ask]:
    """A process that reads token ids as a line of JSON and answers with one: what others make of the tokenizer in a
    GGUF file is not always that tokenizer."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    wire_in, wire_out = process.stdin, process.stdout

    def ask(prompt: str) -> Answer:
        wire_in.write(json.dumps(tokenizer.encode(prompt, add_special=False)) + "\n")
        wire_in.flush()
        for line in wire_out:
            if line.startswith('{"answer"'):
                found = json.loads(line)
                return Answer(tokenizer.decode(found["answer"]), len(found["answer"]), found["speed"])
        raise SystemExit(f"{' '.join(command)} ended")

    try:
        yield ask
    finally:
        wire_in.close()
        process.wait(60)


def quantized(folder: Path, gguf: Path, kinds: list[str]) -> dict[str, Path]:
    """The model in llama.cpp's other formats, made where they are missing."""
    found = {}
    for kind in kinds:
        path = gguf.with_name(f"{gguf.stem.split('.')[0]}.{kind}.gguf")
        if not path.exists():
            command = [str(folder / "llama-quantize"), "--allow-requantize", str(gguf), str(path), kind, "2"]
            subprocess.run(command, check=True, capture_output=True)
        found[kind] = path
    return found


@dataclass
class Ways:
    """Every setting, by the name it has in the tables."""

    one: dict[str, Ask]
    plain: dict[str, str]  # of a setting with drafts: the one without
    reading: dict[str, peer_loads.Read]
    at_once: dict[str, peer_loads.Write]


def start_all(args: argparse.Namespace, subject: Subject, stack: ExitStack, tokenizer: Tokenizer) -> Ways:
    """Servers and children, started."""
    ways = Ways({}, {}, {}, {})
    ports = iter(range(args.port, args.port + 100))
    add_llama(ways, args, subject, stack, ports)
    add_ours(ways, args.max_tokens, subject, stack, ports)
    found = ways.one
    if args.openvino:
        for mode in ("plain", "lookup"):
            command = [args.openvino_python, str(HERE / "peer_openvino.py"), str(args.openvino), mode]
            if mode != "plain":
                ways.plain[f"OpenVINO int8 {mode}"] = "OpenVINO int8 plain"
            found[f"OpenVINO int8 {mode}"] = stack.enter_context(child([*command, str(args.max_tokens)], tokenizer))
    if args.transformers:
        command = [sys.executable, str(HERE / "peer_transformers.py"), str(args.gguf), str(args.max_tokens)]
        found["transformers float32"] = stack.enter_context(child(command, tokenizer))
    return ways


def add_llama(ways: Ways, args: argparse.Namespace, subject: Subject, stack: ExitStack, ports: Iterator[int]) -> None:
    """Each format plain, with n-gram drafts and with the draft model; in int8 also with slots for eight requests."""
    drafts: dict[str, tuple[str, ...]] = {"": (), " n-gram": NGRAM}
    if subject.draft_gguf is not None:
        draft = quantized(args.llama, subject.draft_gguf, ["Q4_0"])["Q4_0"]
        drafts[" draft model"] = (*DRAFT_MODEL, "-md", str(draft))
    for kind, path in quantized(args.llama, subject.gguf, list(subject.formats)).items():
        command = [str(args.llama / "llama-server"), "-m", str(path), "-t", "2", "-tb", "2"]
        for suffix, flags in drafts.items():
            port, name = next(ports), f"llama.cpp {kind}{suffix}"
            alone = [*command, "-c", "2048", "-np", "1", "--port", str(port), *flags]
            stack.enter_context(server(alone, port))
            ways.one[name] = llama(port, args.max_tokens)
            if flags:
                ways.plain[name] = f"llama.cpp {kind}"
            else:
                ways.reading[name] = peer_loads.llama_reads(port)
            if kind == EIGHT_BITS and subject.draft is None:
                port = next(ports)
                room = str(1024 * peer_loads.REQUESTS)
                several = [*command, "-c", room, "-np", str(peer_loads.REQUESTS), "--port", str(port), *flags]
                stack.enter_context(server(several, port))
                ways.at_once[name] = peer_loads.llama_writes(port)


def add_ours(ways: Ways, max_tokens: int, subject: Subject, stack: ExitStack, ports: Iterator[int]) -> None:
    """Each quantization plain and with drafts, named as what drafts; the controller chooses their lengths."""
    drafters = "auto" if subject.draft is None else "suffix+recycle+draft model"
    for quantization in subject.quantizations:
        port = next(ports)
        command = [sys.executable, "-m", "foretell", "serve", "--port", str(port), "--quantization", quantization]
        command += [] if subject.model is None else ["--model", subject.model, "--max-model-len", "2048"]
        command += [] if subject.draft is None else ["--drafter", f"suffix,recycle,model:{subject.draft}"]
        stack.enter_context(server(command, port, "/ready"))
        name = "foretell float32" if quantization == "none" else f"foretell {quantization}"
        ways.one[name] = ours(port, max_tokens, False)
        ways.one[f"{name} {drafters}"] = ours(port, max_tokens, True)
        ways.plain[f"{name} {drafters}"] = name
        ways.reading[name] = peer_loads.we_read(port)
        if subject.draft is None:
            ways.at_once[name] = peer_loads.we_write(port, False)
            ways.at_once[f"{name} {drafters}"] = peer_loads.we_write(port, True)


def prompts(per_kind: int, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Kind and prompt, as the model wants to see it."""
    items, _ = select(load("own", tasks=tuple(KINDS)), per_kind, lambda item: True)
    return [(KINDS[item.task], tokenizer.apply_chat_template(item.messages)) for item in items]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--synthetic", type=Path, help="folder for the synthetic 1.1B model, instead of --gguf")
    parser.add_argument("--llama-source", type=Path, help="checkout of llama.cpp, for --synthetic")
    parser.add_argument("--formats", default="F32,Q8_0,Q4_0")
    parser.add_argument("--quantizations", default="none,int8", help="ours, with --gguf")
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--openvino-python", default=sys.executable)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--port", type=int, default=18100)
    parser.add_argument("--title", default="several engines", help="what the table of this run is to say of the models")
    parser.add_argument("--out", type=Path, help="write the JSON object to this file")
    args = parser.parse_args()
    if args.synthetic is not None and args.llama_source is not None:
        subject = synthetic(args.synthetic, args.llama_source)
    elif args.gguf is not None:
        subject = Subject(args.gguf, tuple(args.formats.split(",")), tuple(args.quantizations.split(",")))
    else:
        parser.error("needs --gguf MODEL.gguf, or --synthetic FOLDER with --llama-source CHECKOUT")
    tokenizer = LLM(drafter="none", quiet=True, kv_memory=0.5).tokenizer
    asked = prompts(args.per_kind, tokenizer)
    speeds: dict[str, dict[str, list[float]]] = {}
    outputs: dict[tuple[str, str], set[str]] = {}
    with ExitStack() as stack:
        all_ways = start_all(args, subject, stack, tokenizer)
        ways = all_ways.one
        for turn in range(args.rounds + 1):
            for kind, prompt in asked:
                names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
                for name in names:
                    answer = ways[name](prompt)
                    if turn:  # the first round warms up
                        speeds.setdefault(name, {}).setdefault(kind, []).append(answer.speed)
                    outputs.setdefault((name, prompt), set()).add(answer.text)
            print(f"round {turn} done", file=sys.stderr, flush=True)
        words = [token for _, prompt in asked for token in tokenizer.encode(prompt)]
        read = peer_loads.reading(all_ways.reading, words, args.rounds)
        several = [prompt for _, prompt in prompts(2, tokenizer)]
        written = peer_loads.at_once(all_ways.at_once, several, args.rounds) if all_ways.at_once else {}
    kept = report(speeds, outputs, [prompt for _, prompt in asked], all_ways.plain)
    peer_loads.report(f"a prompt of {peer_loads.PROMPT} tokens", read)
    if written:
        peer_loads.report(f"{peer_loads.REQUESTS} concurrent requests", written)
    run = {
        "bench": "peers",
        "date": date.today().isoformat(),
        "models": args.title,
        "machine": describe_host(),
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "tokens_per_second": kept,
        "reading": read,
        "at_once": written,
    }
    if args.out:
        args.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(run))


def report(
    speeds: dict[str, dict[str, list[float]]],
    outputs: dict[tuple[str, str], set[str]],
    asked: list[str],
    plain_of: dict[str, str],
) -> dict[str, dict[str, float]]:
    """The table of one text at a time."""
    kinds = list(KINDS.values())
    print("| tokens/s | " + " | ".join(kinds) + " | geometric mean | spread | same text as its plain |")
    print("| --- |" + " ---: |" * (len(kinds) + 2) + " --- |")
    kept = {}
    for name, by_kind in speeds.items():
        each = [median(by_kind[kind]) for kind in kinds]
        spread = max(max(values) / min(values) for values in by_kind.values())
        plain = plain_of.get(name)
        same = "" if plain is None else f"{sum(outputs[name, p] == outputs[plain, p] for p in asked)} of {len(asked)}"
        kept[name] = {"geometric_mean": geometric_mean(each), **dict(zip(kinds, each, strict=True))}
        cells = " | ".join(f"{value:.1f}" for value in [*each, geometric_mean(each)])
        print(f"| {name} | {cells} | {spread:.2f} | {same} |")
    return kept


if __name__ == "__main__":
    main()
