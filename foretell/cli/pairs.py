"""foretell pairs and foretell check-pair: known drafters of a target, and whether a draft model fits one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .common import Command, add_output_arguments, check_output_path, log, output_result
from .tables import print_columns

if TYPE_CHECKING:
    from foretell.build.draft_compat import DraftCompat
    from foretell.hub.catalog import LocalModel
    from foretell.hub.pairs import KnownTarget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model name, folder or id (default: list all known targets)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    from foretell.hub.catalog import local_models
    from foretell.hub.pairs import FOR_ANY, known_targets

    known = known_targets()
    shown = known if args.model is None else matching_targets(args.model)
    found = shown[0] if args.model is not None and len(shown) == 1 else None
    models = local_models()
    result = {"model": args.model, "known": [as_json(target, models) for target in shown], "for_any": FOR_ANY}
    output_result(result, args)
    if args.json:
        return 0
    if len(shown) > 1:
        print_columns(("target", "size", "drafters", ""), overview(shown), right=(1,))
    else:
        print(about(args.model, found, known))
    print_drafters(known_drafters(found.id if found else ""))
    return 0


def matching_targets(name: str) -> tuple[KnownTarget, ...]:
    """Return the target of a model, or else those whose id has the name as a part."""
    from foretell.hub.pairs import find_target, known_targets

    found = find_target(name)
    return (found,) if found else tuple(each for each in known_targets() if name and name.lower() in each.id.lower())


def as_json(target: KnownTarget, models: Sequence[LocalModel]) -> dict[str, Any]:
    from dataclasses import asdict

    from foretell.hub.pairs import is_installed

    drafts = [
        asdict(draft) | {"drafter": draft.drafter, "here": is_installed(draft, models)} for draft in target.drafts
    ]
    return asdict(target) | {"drafts": drafts}


def overview(known: Iterable[KnownTarget]) -> list[tuple[str, ...]]:
    """Return a row per target."""
    return [
        (
            target.id,
            size(target.billions),
            ", ".join(dict.fromkeys(draft.kind for draft in target.drafts)),
            f"not served here: {target.not_served}" if target.not_served else "",
        )
        for target in known
    ]


def about(name: str, target: KnownTarget | None, known: Iterable[KnownTarget]) -> str:
    """Return the line on one target, or that no drafter is known for it."""
    if target is None:
        close = difflib.get_close_matches(name, [each.id for each in known], n=1)
        hint = f"; did you mean {close[0]}?" if close else "; `foretell pairs` lists the known models"
        return f"no draft model or head is known for {name}{hint}"
    remarks = [target.note, f"not served here: {target.not_served}" if target.not_served else ""]
    return ", ".join([target.id, size(target.billions), *filter(None, remarks)])


def known_drafters(name: str) -> list[dict[str, Any]]:
    """Return the drafters that fit a target: those made for it, and those for any target."""
    from foretell.hub.catalog import local_models
    from foretell.hub.pairs import FOR_ANY, find_target, is_installed

    target, models = find_target(name) if name else None, local_models()
    own = [
        {"drafter": each.drafter, "billions": each.billions, "here": is_installed(each, models), "note": each.note}
        for each in (target.drafts if target else ())
    ]
    return own + [{"drafter": kind, "billions": None, "here": True, "note": note} for kind, note in FOR_ANY.items()]


def print_drafters(drafters: Iterable[dict[str, Any]]) -> None:
    """Print the drafters made for a target, then those for any target."""
    from foretell.hub.pairs import FOR_ANY

    own: list[dict[str, Any]] = []
    for_any: list[dict[str, Any]] = []
    for each in drafters:
        (for_any if each["drafter"] in FOR_ANY else own).append(each)
    for title, some in (("drafters", own), ("for any model, with nothing to download", for_any)):
        if some:
            print(f"\n{title}:")
            print_columns(("", "", ""), drafter_rows(some))


def drafter_rows(drafters: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return a table of drafters: name, size and remarks."""
    return [
        (
            f"  {each['drafter']}",
            "" if each["billions"] is None else size(each["billions"]),
            ", ".join(filter(None, ["" if each["here"] else "to download", each["note"]])),
        )
        for each in drafters
    ]


def size(billions: float | None) -> str:
    """Format a number of parameters."""
    if billions is None:
        return "?"
    return f"{billions:.3g}B" if billions >= 1 else f"{billions * 1000:.0f}M"


PAIRS = Command("list known draft models and heads of a target", add_arguments, run)


WILL_NOT = 1
VERDICTS = {
    "same": "works: same tokenizer",
    "tokens": "works, with another tokenizer: by shared tokens",
    "strings": "works, with another tokenizer: by text",
    "refused": "will not work",
}


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="target model: built-in name, folder, .gguf file or Hugging Face id")
    parser.add_argument("draft", help="draft model, named likewise")
    add_output_arguments(parser)


def run_check(args: argparse.Namespace) -> int:
    check_output_path(args)
    from foretell.build.draft_compat import check_model_names

    found = check_model_names(args.target, args.draft, log)
    output_result(compat_json(found, args.target, args.draft), args)
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
    """Return the result, its reason, notes, and what to do: use the draft model, or look for a smaller one."""
    lines = [VERDICTS[found.kind], found.message, *found.notes]
    if found.works and (found.weight_ratio or 0) >= 1:
        lines[0] += ", but it cannot pay off"
        lines.append(f"--drafter model:{draft} runs, but is slower; foretell pairs {target} lists smaller ones")
    elif found.works:
        lines.append(f"use it: foretell generate PROMPT --model {target} --drafter model:{draft}")
    return [lines[0], *(f"  {line}" for line in lines[1:])]


CHECK_PAIR = Command("check whether a draft model works for a target", add_check_arguments, run_check)
