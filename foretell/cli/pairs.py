"""foretell pairs: which drafts suit a model."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .common import Command, add_output_arguments, check_out, give, log

if TYPE_CHECKING:
    from foretell.build.draft_compat import DraftCompat
    from foretell.hub.catalog import LocalModel
    from foretell.hub.pairs import KnownTarget, Suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a model's name, folder or id; left out: all that are known")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_out(args)
    from foretell.hub.catalog import local_models
    from foretell.hub.pairs import FOR_ANY, find_target, known_targets

    known = known_targets()
    found = None if args.model is None else find_target(args.model)
    shown = known if args.model is None else () if found is None else (found,)
    models = local_models()
    result = {"model": args.model, "known": [as_json(target, models) for target in shown], "for_any": FOR_ANY}
    give(result, args)
    if not args.json:
        lines = overview(known) if args.model is None else details(args.model, found, known, models)
        print("\n".join([*lines, *for_any(FOR_ANY)]))
    return 0


def as_json(target: KnownTarget, models: Sequence[LocalModel]) -> dict[str, Any]:
    from dataclasses import asdict

    from foretell.hub.pairs import is_here

    drafts = [asdict(draft) | {"drafter": draft.drafter, "here": is_here(draft, models)} for draft in target.drafts]
    return asdict(target) | {"drafts": drafts}


def overview(known: Iterable[KnownTarget]) -> list[str]:
    """A line for each target."""
    return [
        f"{target.id:48} {size(target.billions):>7}   {', '.join(dict.fromkeys(d.kind for d in target.drafts))}"
        for target in known
    ]


def details(
    name: str, target: KnownTarget | None, known: Iterable[KnownTarget], models: Sequence[LocalModel]
) -> list[str]:
    """The drafts of one target, or that none is known."""
    if target is None:
        close = difflib.get_close_matches(name, [each.id for each in known], n=1)
        hint = f"; did you mean {close[0]}?" if close else "; `foretell pairs` lists the models that are known"
        return [f"no trained draft is known for {name}{hint}"]
    about = f" ({target.note})" if target.note else ""
    return [f"{target.id}, {size(target.billions)}{about}", *(_draft_line(draft, models) for draft in target.drafts)]


def _draft_line(draft: Suggestion, models: Sequence[LocalModel]) -> str:
    from foretell.hub.pairs import is_here

    here = "here" if is_here(draft, models) else ""
    return f"  {draft.drafter:64} {size(draft.billions):>7} {here:4}  {draft.note}".rstrip()


def for_any(ways: dict[str, str]) -> list[str]:
    """What needs no draft."""
    return ["for any model, with nothing to fetch:", *(f"  {name:12} {words}" for name, words in ways.items())]


def size(billions: float | None) -> str:
    """Weights in words."""
    if billions is None:
        return "?"
    return f"{billions:.3g}B" if billions >= 1 else f"{billions * 1000:.0f}M"


PAIRS = Command("list drafts and heads that suit a model", add_arguments, run)


WILL_NOT = 1
VERDICTS = {
    "same": "works: the same tokens",
    "tokens": "works, with another tokenizer: by the tokens both have",
    "strings": "works, with another tokenizer: by text",
    "refused": "will not work",
}


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", help="the model whose text is wanted: a built-in name, a folder, a .gguf file or an id"
    )
    parser.add_argument("draft", help="the model that is to guess, named likewise")
    add_output_arguments(parser)


def run_check(args: argparse.Namespace) -> int:
    check_out(args)
    from foretell.build.draft_compat import check_model_names

    found = check_model_names(args.target, args.draft, log)
    give(compat_json(found, args.target, args.draft), args)
    if not args.json:
        print("\n".join(in_words(found, args.target, args.draft)))
    return 0 if found.works else WILL_NOT


def compat_json(found: DraftCompat, target: str, draft: str) -> dict[str, Any]:
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


CHECK_PAIR = Command("say whether a draft model will work for a target, and how", add_check_arguments, run_check)
