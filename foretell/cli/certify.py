"""foretell certify: tests that speculation does not change the output."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import given_options
from foretell.vllm_config import speculation_from_vllm

from .bench_common import open_target
from .common import Command, add_engine_arguments, add_output_arguments, check_output_path, load_llm, log, output_result

if TYPE_CHECKING:
    from foretell.certify.certificate import Certificate, CertifyJob

COMPARED_TOKENS = 20_000  # half of them greedy
MAX_TOKENS = 48  # output tokens per prompt
DRAFT_TOKENS = 8  # per step, by default
EXIT = {"lossless": 0, "not lossless": 3, "inconclusive": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="prompts to compare, one per line (default: eight)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer samples; reports the smallest detectable difference"
    )
    parser.add_argument("--plant", metavar="NAME", help="certify with a known bug injected; must fail")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="output tokens per prompt (default: 48)")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"compare at least N tokens, over the benchmark prompts (default: {COMPARED_TOKENS}, unless --quick,"
        " --prompts or --max-tokens)",
    )
    add_output_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    from foretell.certify.certificate import certify

    sys.path.insert(0, "")  # custom rules are also imported from the working directory
    report = log if args.json else print
    job = _job(args)
    check_drafter(args)
    if job.needs_model:
        check_length(args, job)
    with redirect_stdout(sys.stderr if args.json else sys.stdout):  # a custom rule may print
        found = certify(job, lambda: load_llm(_for_certificate(args)), report)
        report(verdict(found))
    output_result(found.as_json(), args)
    return EXIT[found.verdict]


def check_drafter(args: argparse.Namespace) -> None:
    """Refuse an unknown drafter before minutes of sampling."""
    from foretell.draft import drafter_names

    given = given_options(_for_certificate(args), SpeculationConfig)
    vllm = getattr(args, "speculative_config", None)
    drafter_names(SpeculationConfig(**given) if vllm is None else speculation_from_vllm(vllm, **given))


def _job(args: argparse.Namespace) -> CertifyJob:
    from foretell.certify.certificate import CertifyJob

    length = MAX_TOKENS if args.max_tokens is None else args.max_tokens
    job = CertifyJob(getattr(args, "rule", "match"), args.plant, args.quick, max_tokens=length)
    if args.prompts is not None:
        job = replace(job, prompts=read_prompts(args.prompts))
    return job if (tokens := _tokens(args)) is None else _long_job(job, tokens)


def _tokens(args: argparse.Namespace) -> int | None:
    """Return the minimum number of tokens to compare, unless prompts or lengths are given."""
    given = args.prompts is not None or args.max_tokens is not None
    if args.tokens is None:
        return None if given or args.quick else COMPARED_TOKENS
    if given:
        raise RequestError("tokens", "uses the benchmark prompts; leave out --prompts and --max-tokens")
    if args.tokens < 1:
        raise RequestError("tokens", f"must be 1 or more, not {args.tokens}")
    return int(args.tokens)


def _long_job(job: CertifyJob, tokens: int) -> CertifyJob:
    """Return a job over the benchmark prompts with equal token counts; each is generated greedily and sampled."""
    from foretell.bench.workloads import own

    prompts = tuple(item.messages[-1]["content"] for item in own())
    return replace(job, prompts=prompts, max_tokens=-(-tokens // (job.num_settings * len(prompts))), ignore_eos=True)


def check_length(args: argparse.Namespace, job: CertifyJob) -> None:
    """Refuse lengths beyond the model's context before minutes of sampling."""
    from foretell.certify.text_equality import encode

    target = open_target(args)
    context = min(target.config.context, getattr(args, "max_model_len", None) or target.config.context)
    longest = max(len(encode(target.tokenizer, prompt)) for prompt in job.prompts)
    available = context - longest
    if available < 1:
        raise RequestError(
            "prompts", f"the longest has {longest} tokens and the context is {context}; give shorter ones"
        )
    if job.max_tokens <= available:
        return
    limit = f"after a prompt of {longest} tokens a context of {context} leaves {available}"
    if job.ignore_eos:
        most = available * job.num_settings * len(job.prompts)
        asked = f"are {job.max_tokens} per output over {len(job.prompts)} prompts, and {limit}"
        raise RequestError("tokens", f"{asked}; ask for {most} or fewer")
    raise RequestError("max_tokens", f"{limit}, not {job.max_tokens}; ask for {available} or fewer")


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the non-empty lines of a file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompts", f"cannot be read: {error}") from None
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise RequestError("prompts", f"{path} has no prompt; put one per line")
    return prompts


def _for_certificate(args: argparse.Namespace) -> argparse.Namespace:
    """Return flags with a fixed draft length and without the rule: steps without drafts would prove nothing."""
    given = {name: value for name, value in vars(args).items() if name != "rule"}
    if "speculative_config" not in given and "num_speculative_tokens_per_batch_size" not in given:
        given.setdefault("num_speculative_tokens", DRAFT_TOKENS)
    return argparse.Namespace(**given)


def verdict(found: Certificate) -> str:
    """Return the verdict; of a lossless run also what was compared, on a second line."""
    if found.verdict == "not lossless":
        return "verdict: NOT LOSSLESS"
    if found.verdict == "inconclusive":
        return f"verdict: inconclusive: {'; '.join(found.reasons)}"
    accepted = sum(each.evidence.accepted for each in found.outputs)
    rejected = sum(each.evidence.rejected for each in found.outputs)
    what = "the same tokens" if found.job.request_rule == "match" else "the same greedy tokens"
    near = f", {found.near_ties} near-ties excused" if found.near_ties else ""
    detectable = f"tests would have detected a total variation of {found.distribution[0].detectable:.3f}"
    compared = f"{what} over {accepted} accepted and {rejected} rejected draft tokens{near}"
    return f"verdict: lossless ({detectable})\n  {compared}"


CERTIFY = Command("check that speculation does not change the output", add_arguments, run)
