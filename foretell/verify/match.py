"""The rule `match`: a guess stands if it is what the target itself chose."""

from __future__ import annotations

from foretell.types import Draft, VerifyResult


def walk(draft: Draft, chosen: list[int] | tuple[int, ...]) -> VerifyResult:
    """Follow the target's own tokens for as long as the draft has them.

    chosen[0] comes after the root, chosen[i + 1] after node i. The text is what it would be without a draft, token for
    token, also when sampling: `chosen` depends on seed and position, not on the draft.
    """
    path: list[int] = []
    node, wanted = -1, chosen[0]
    for child, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):  # parents come first
        if parent == node and token == wanted:
            path.append(child)
            node, wanted = child, chosen[child + 1]
    return VerifyResult(tuple(path), wanted)
