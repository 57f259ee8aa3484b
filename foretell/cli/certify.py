"""foretell certify: is the text really the target's own?"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import given_options

from .command import Command
from .common import add_engine_arguments, add_output_arguments, check_out, give, load_llm

if TYPE_CHECKING:
    from foretell.certify.certificate import Certificate, Order

GUESSED = 8  # tokens a step, where nothing else is asked for
NOT_LOSSLESS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="prompts to compare, one a line (default: eight)")
    parser.add_argument("--quick", action="store_true", help="fewer draws; says what it would find")
    parser.add_argument("--plant", metavar="NAME", help="certify with a known bug in; must fail")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="tokens a prompt (default: 48)")
    add_output_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_out(args)
    from foretell.certify.certificate import certify

    sys.path.insert(0, "")  # a rule from outside is looked for where the user stands, too
    say = _say_aside if args.json else print
    order = _order(args)
    check_drafter(args)
    with redirect_stdout(sys.stderr if args.json else sys.stdout):  # a rule from outside may print
        found = certify(order, lambda: load_llm(_for_certificate(args)), say)
        say(verdict(found))
    give(found.as_json(), args)
    return 0 if found.lossless else NOT_LOSSLESS


def check_drafter(args: argparse.Namespace) -> None:
    """Refuse a wrong drafter now and not after minutes of draws."""
    from foretell.draft import arms

    given = given_options(_for_certificate(args), SpeculationConfig)
    vllm = getattr(args, "speculative_config", None)
    arms(SpeculationConfig(**given) if vllm is None else SpeculationConfig.from_vllm(vllm, **given))


def _order(args: argparse.Namespace) -> Order:
    from foretell.certify.certificate import Order

    rule = getattr(args, "rule", "match")
    if args.prompts is None:
        return Order(rule, args.plant, args.quick, max_tokens=args.max_tokens)
    return Order(rule, args.plant, args.quick, read_prompts(args.prompts), args.max_tokens)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not empty."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompts", f"cannot be read: {error}") from None
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise RequestError("prompts", f"{path} has no prompt; put one on each line")
    return prompts


def _for_certificate(args: argparse.Namespace) -> argparse.Namespace:
    """The rule is set for each request, and every step guesses: what is not drafted would prove nothing."""
    given = {name: value for name, value in vars(args).items() if name != "rule"}
    if "speculative_config" not in given and "num_speculative_tokens_per_batch_size" not in given:
        given.setdefault("num_speculative_tokens", GUESSED)
    return argparse.Namespace(**given)


def _say_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def verdict(found: Certificate) -> str:
    """The last line for people."""
    if not found.lossless:
        return "verdict: NOT LOSSLESS"
    drawn, ties = found.draws[0], found.near_ties
    what = "the same tokens" if found.order.judged_as == "match" else "the same distribution"
    near = f", {ties} near-ties counted" if ties else ""
    return f"verdict: lossless: {what}, to a total variation of {drawn.finds:.3f}{near}"


CERTIFY = Command("check that speculation does not change the text", add_arguments, run)
