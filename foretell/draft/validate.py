"""Checks drafts of any drafter before the engine uses them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretell.types import NO_DRAFT, Draft

ROUNDING = 1e-2  # tolerated error of probabilities and their sums
INTEGERS = frozenset({int})


def valid_drafts(found: Iterable[object], count: int, name: str) -> list[Draft]:
    """Return what a drafter proposed for `count` sequences, or raise."""
    drafts = [valid_draft(draft, name) for draft in found]
    if len(drafts) != count:
        raise ValueError(f"{name} returned {len(drafts)} drafts for {count} sequences")
    return drafts


def valid_offers(found: Iterable[object], count: int, name: str) -> list[Mapping[str, Draft]]:
    """Return the free drafts for `count` sequences, by drafter, or raise."""
    offers: list[Mapping[str, Draft]] = []
    for offer in found:
        if not isinstance(offer, Mapping):
            raise TypeError(f"{name} offered a {type(offer).__name__}, not drafts by drafter")
        offers.append({arm: valid_draft(draft, name) for arm, draft in offer.items()})
        if any(draft.device_draft is not None for draft in offers[-1].values()):
            raise ValueError(f"{name} offered a draft whose tokens are still on a device")
    if len(offers) != count:
        raise ValueError(f"{name} made {len(offers)} offers for {count} sequences")
    return offers


def valid_draft(draft: object, name: str) -> Draft:
    """Return a draft of plain integers whose parents form a tree, or raise."""
    if draft is NO_DRAFT:
        return NO_DRAFT
    if not isinstance(draft, Draft):
        raise TypeError(f"{name} returned a {type(draft).__name__}, not a Draft")
    if draft.device_draft is not None:  # its tokens are still on the device
        return draft
    nodes = len(draft.tokens)
    if type(draft) is not Draft or not _has_plain_numbers(draft):
        draft = Draft(
            _integers(draft.tokens, "token", name),
            _integers(draft.parents, "parent", name),
            draft.source if isinstance(draft.source, str) else "",
            None if draft.sampled is None else tuple(bool(each) for each in draft.sampled),
            None if draft.confidence is None else tuple(float(each) for each in draft.confidence),
            draft.probs,
            draft.origins,
        )
    if draft.origins is not None and not all(isinstance(each, str) for each in draft.origins):
        raise TypeError(f"{name} named origins of draft tokens that are no strings")
    for part in (draft.parents, draft.sampled, draft.confidence, draft.origins):
        if part is not None and len(part) != nodes:
            raise ValueError(f"{name} described {len(part)} of {nodes} draft tokens")
    if not draft.is_chain and any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise ValueError(f"{name} returned a draft token whose parent does not come before it")
    _check_confidence(draft.confidence, name)
    return draft


def _has_plain_numbers(draft: Draft) -> bool:
    """Return whether nothing has to be converted; drafts of built-in drafters are such."""
    own = type(draft.tokens) is tuple and type(draft.parents) is tuple and isinstance(draft.source, str)
    plain = own and INTEGERS.issuperset(map(type, draft.tokens)) and INTEGERS.issuperset(map(type, draft.parents))
    sure, drawn = draft.confidence, draft.sampled
    return (
        plain
        and (sure is None or (type(sure) is tuple and set(map(type, sure)) <= {float}))
        and (drawn is None or (type(drawn) is tuple and set(map(type, drawn)) <= {bool}))
    )


def _integers(numbers: Iterable[Any], what: str, name: str) -> tuple[int, ...]:
    """Convert integers of any library; a bool or a float is an error."""
    found = []
    for number in numbers:
        try:
            if isinstance(number, bool):
                raise TypeError
            found.append(operator.index(number))
        except (TypeError, ValueError):
            raise TypeError(f"{name} returned {number!r:.40} as a {what}, not an integer") from None
    return tuple(found)


def _check_confidence(confidence: tuple[float, ...] | None, name: str) -> None:
    if not confidence:
        return
    # A NaN makes the sum a NaN, which compares false.
    if not (min(confidence) >= 0 and max(confidence) <= 1 + ROUNDING and sum(confidence) >= 0):
        raise ValueError(f"{name} gave a confidence outside 0 to 1")


def valid_probs(draft: Draft, vocab: int, name: str, trusted: bool) -> Draft:
    """Return the draft with float32 probabilities; rows of sampled draft tokens must be distributions.

    Rows of a `trusted` drafter are not summed up: that takes up to a millisecond, and on a GPU waits for the device.
    """
    drawn = [node for node in range(len(draft)) if draft.is_sampled(node)]
    if draft.probs is None:
        if drawn:
            raise ValueError(f"{name} sampled draft tokens without the probabilities they were sampled from")
        return draft
    probs = draft.probs if isinstance(draft.probs, Tensor) else torch.as_tensor(draft.probs)
    if tuple(probs.shape) != (len(draft), vocab) or probs.is_complex():
        raise ValueError(f"{name} gave probabilities of shape {tuple(probs.shape)}, not {(len(draft), vocab)}")
    probs = probs.float()
    rows = probs if len(drawn) == len(draft) else probs[drawn]
    # A NaN makes both comparisons false.
    if drawn and not trusted and not bool(((rows.sum(-1) - 1).abs() <= ROUNDING).all() & (rows >= 0).all()):
        raise ValueError(f"{name} gave probabilities that are negative, not finite or do not sum to 1")
    return replace(draft, probs=probs)
