"""foretell generate: answer one prompt."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError
from foretell.types import Delta

from .common import (
    Command,
    add_engine_arguments,
    add_output_arguments,
    add_sampling_arguments,
    check_output_path,
    check_sampling,
    load_llm,
    log,
    output_result,
    read_text,
    sampling_params,
)
from .interrupts import catch_interrupts
from .stream_output import print_legend, print_stream, stream_renderer

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.outputs import CompletionOutput, Logprob, RequestOutput
    from foretell.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="prompt; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--show", action="store_true", help="colour each token by its drafter")
    add_output_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_sampling(args)
    check_output_path(args)
    text = read_text(args.prompt)
    if args.raw and args.system:
        raise RequestError("system", "needs the chat template; leave out --raw, or put it into the prompt")
    llm = load_llm(args)
    params = sampling_params(args, llm)
    prompt = _prompt_text(args, llm, text)
    tokens = llm.tokenizer.encode(prompt, add_special=args.raw or not llm.tokenizer.chat_template)
    wants_rows = params.logprobs is not None or params.prompt_logprobs is not None
    if wants_rows and not args.json and args.out is None:
        raise RequestError("logprobs", "are part of the JSON output; add --json or --out FILE")
    complete = args.json or args.out is not None or params.n > 1
    is_cut = _complete(llm, tokens, params, args) if complete else _stream(llm, tokens, params, args.show)
    if is_cut:
        raise KeyboardInterrupt  # after what there is was printed and written
    return 0


def _prompt_text(args: argparse.Namespace, llm: LLM, text: str) -> str:
    """Apply the chat template; base models without one continue the prompt."""
    if not args.raw and args.system and not llm.tokenizer.chat_template:
        raise RequestError("system", "needs a chat template, and this model has none; put it into the prompt")
    if args.raw or not llm.tokenizer.chat_template:
        return text
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])


def _complete(llm: LLM, tokens: list[int], params: SamplingParams, args: argparse.Namespace) -> bool:
    """Generate, then print and write the outputs; return whether Ctrl-C cut them short."""
    with catch_interrupts(llm.interrupt):
        (output,) = llm.generate([tokens], params)
    is_cut = any(choice.finish_reason == "abort" for choice in output.outputs)
    output_result(as_json(llm, output) | ({"interrupted": True} if is_cut else {}), args)
    if not args.json:
        print_outputs(llm, output, params, args.show)
    if is_cut and args.out is not None:
        log(f"foretell: {args.out} has the output so far, marked as interrupted")
    return is_cut


def _stream(llm: LLM, tokens: list[int], params: SamplingParams, show: bool) -> bool:
    """Print the output as it is generated; return whether Ctrl-C cut it short."""
    return print_stream(llm, tokens, params, show=show).finish == "abort"


def print_outputs(llm: LLM, output: RequestOutput, params: SamplingParams, show: bool) -> None:
    """Print all outputs as a stream would be: coloured if wanted, with control characters replaced."""
    prompt, outputs, seen = output.prompt_token_ids, list[str](), dict[str, None]()
    for choice in output.outputs:
        renderer = stream_renderer(llm, prompt, show, skip_special=params.skip_special_tokens)
        tokens, origins = tuple(choice.token_ids), tuple(choice.speculation.origins)
        outputs.append(renderer.render(Delta("", choice.index, tokens, choice.text, origins)))
        seen |= renderer.seen
    print("\n\n".join(outputs))
    renderer.seen = seen
    print_legend(renderer)


def as_json(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """Return the object of `--json`."""
    completion = sum(len(choice.token_ids) for choice in output.outputs)
    prompt = len(output.prompt_token_ids)
    timings = output.timings
    first = output.outputs[0]
    decoded = completion - len(output.outputs)
    return {
        "model": llm.config.model,
        **_choice(first),
        "outputs": [_choice(choice) for choice in output.outputs],
        **_prompt_rows(output),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        },
        "timings": {
            "queue_s": timings.queue,
            "first_token_s": timings.first_token,
            "decode_s": timings.decode,
            "total_s": timings.total,
            "tokens_per_second": decoded / timings.decode if decoded > 0 and timings.decode > 0 else None,
        },
    }


def _prompt_rows(output: RequestOutput) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [row and _row(row) for row in output.prompt_logprobs]}


def _row(row: dict[int, Logprob]) -> list[dict[str, Any]]:
    """Return the log-probabilities of a position: the top k, then the token itself."""
    return [{"token": token, "text": e.decoded_token, "logprob": e.logprob, "rank": e.rank} for token, e in row.items()]


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    record = choice.speculation
    return {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "seed": choice.seed,
        **({} if choice.logprobs is None else {"logprobs": [_row(row) for row in choice.logprobs]}),
        "speculation": {
            "rule": record.rule,
            "lossless": record.lossless,
            "steps": record.steps,
            "drafted": record.drafted,
            "accepted": record.accepted,
            "accepted_per_step": record.accepted_per_step,
            "by_drafter": {
                name: {"drafted": count.drafted, "accepted": count.accepted}
                for name, count in record.by_drafter.items()
            },
            "origins": list(record.origins),
        },
    }


GENERATE = Command("answer one prompt", add_arguments, run)
