"""The rule `match`: a draft token is accepted if the target itself chose it."""

from __future__ import annotations

from foretell.types import Draft, VerifyResult


def verify_match(draft: Draft, target_tokens: list[int] | tuple[int, ...]) -> VerifyResult:
    """Accept the path of the draft along the tokens that the target chose.

    `target_tokens[0]` follows the root, `target_tokens[i + 1]` follows node i. The output equals that of decoding
    without drafts token for token, also when sampling, because the target's token depends on seed and position and
    never on the draft.
    """
    path: list[int] = []
    node, next_token = -1, target_tokens[0]
    for child, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):  # parents come first
        if parent == node and token == next_token:
            path.append(child)
            node, next_token = child, target_tokens[child + 1]
    return VerifyResult(tuple(path), next_token)
