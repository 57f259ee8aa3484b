"""foretell check-pair: will this draft model work for that target?"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .command import Command
from .common import add_output_arguments, check_out, give

if TYPE_CHECKING:
    from foretell.build.draft_compat import DraftCompat

WILL_NOT = 1
VERDICTS = {
    "same": "works: the same tokens",
    "tokens": "works, with another tokenizer: by the tokens both have",
    "strings": "works, with another tokenizer: by text",
    "refused": "will not work",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", help="the model whose text is wanted: a built-in name, a folder, a .gguf file or an id"
    )
    parser.add_argument("draft", help="the model that is to guess, named likewise")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_out(args)
    from foretell.build.draft_compat import check_model_names

    found = check_model_names(args.target, args.draft, _say)
    give(as_json(found, args.target, args.draft), args)
    if not args.json:
        print("\n".join(in_words(found, args.target, args.draft)))
    return 0 if found.works else WILL_NOT


def as_json(found: DraftCompat, target: str, draft: str) -> dict[str, Any]:
    shared = found.vocab_map
    return {
        "target": target,
        "draft": draft,
        "works": found.works,
        "kind": found.kind,
        "reason": found.message,
        "notes": list(found.notes),
        "parameters": found.parameters and dict(zip(("target", "draft"), found.parameters, strict=True)),
        "weight_ratio": found.weight_ratio,
        "agreement": found.agreement,
        "shared_tokens": None if shared is None else len(shared.to_target),
        "drafter": f"model:{draft}" if found.works else None,
    }


def in_words(found: DraftCompat, target: str, draft: str) -> list[str]:
    """The verdict, its reason, what to know, and what to type."""
    lines = [VERDICTS[found.kind], found.message, *found.notes]
    if found.works:
        lines.append(f"use it: foretell generate PROMPT --model {target} --drafter model:{draft}")
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


CHECK_PAIR = Command("say whether a draft model will work for a target, and how", add_arguments, run)
