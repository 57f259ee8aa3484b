"""The rule `match`: a guess stands if it is what the target itself chose."""

from __future__ import annotations

from foretell.types import Draft, Verdict


def walk(draft: Draft, chosen: list[int] | tuple[int, ...]) -> Verdict:
    """Follow the target's own tokens for as long as the draft has them.

    chosen[0] comes after the root, chosen[i + 1] after node i. The text is what it would be without a draft, token for
    token, also when sampling: `chosen` depends on seed and position, not on the draft.
    """
    path: list[int] = []
    node = -1
    while True:
        wanted = chosen[node + 1]
        match = next((child for child in draft.children(node) if draft.tokens[child] == wanted), None)
        if match is None:
            return Verdict(tuple(path), wanted)
        path.append(match)
        node = match
