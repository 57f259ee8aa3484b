"""Logits processors: penalties, bias, token masks, thinking budget, and the token history they depend on."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from foretell.types import Request


class TokenHistory:
    """The tokens of one sequence before a step. Each row adds the path of draft tokens that leads to it."""

    def __init__(self, request: Request, tokens: list[int], vocab: int, device: torch.device | None = None) -> None:
        self.request, self.vocab, self.device = request, vocab, device
        self.prompt, self._tokens = len(request.prompt), tokens
        self.error: str | None = None  # failure of a user's logits processor

    @cached_property
    def output_tokens(self) -> list[int]:
        return self._tokens[self.prompt :]

    def tail(self, count: int, path: tuple[int, ...]) -> list[int]:
        """Return the last `count` tokens, prompt included."""
        return [*self._tokens[-count:], *path][-count:] if count else []

    @cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of `logit_bias` and their biases."""
        wanted = self.request.params.logit_bias or {}
        tokens = torch.tensor(list(wanted), dtype=torch.long, device=self.device)
        return tokens, torch.tensor(list(wanted.values()), dtype=torch.float32, device=self.device)

    @cached_property
    def disallowed(self) -> Tensor | None:
        """Return a mask of the tokens outside `allowed_token_ids`, [vocab]; None if all are allowed."""
        allowed = self.request.params.allowed_token_ids
        return None if allowed is None else _only(self, allowed)

    @cached_property
    def only_masks_tokens(self) -> bool:
        """Return whether the request only masks single tokens and changes no other logit."""
        request, p = self.request, self.request.params
        changes = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 or p.logit_bias
        return not (changes or p.logits_processors or p.allowed_token_ids is not None or request.reasoning)

    @cached_property
    def _counts(self) -> Tensor:
        return self._bins(self.output_tokens)

    @cached_property
    def _seen(self) -> Tensor:
        return self._bins(self._tokens) > 0

    def _bins(self, tokens: list[int] | tuple[int, ...]) -> Tensor:
        return torch.bincount(torch.tensor(tokens, dtype=torch.long, device=self.device), minlength=self.vocab)

    def counts(self, path: tuple[int, ...]) -> Tensor:
        """Return how often each token was generated, [vocab]."""
        if not path:
            return self._counts
        return self._counts + self._bins(path)

    def seen(self, path: tuple[int, ...]) -> Tensor:
        """Return which tokens occur in the prompt or the output, [vocab]."""
        if not path:
            return self._seen
        seen = self._seen.clone()
        seen[list(path)] = True
        return seen


def changes_logits(request: Request, written: int) -> bool:
    """Return whether any setting changes the model's logits after `written` output tokens."""
    p = request.params
    return bool(
        p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1
        or p.logit_bias
        or p.allowed_token_ids is not None
        or p.logits_processors
        or request.bad_words
        or request.reasoning
        or (p.min_tokens > written and (request.end_ids or p.stop_token_ids))
        or p.structured_outputs is not None
    )


def process_row(scores: Tensor, history: TokenHistory, path: tuple[int, ...], allowed: Tensor | None) -> Tensor:
    """Apply all processors of the request to logits [vocab]; `path` counts as output, `allowed` is a grammar's mask."""
    scores = _bias(scores.clone(), history)
    scores = _penalise(scores, history, path)
    scores = _process(scores, history, path)
    # Masks come last, so that nothing undoes them.
    kept = _without_forbidden(scores, history, path, allowed)
    if float(kept.max()) == float("-inf"):  # no token is allowed: end the sequence
        ends = _only(history, sorted(history.request.end_ids) or [0])
        return torch.zeros_like(kept).masked_fill_(ends, float("-inf"))
    return kept


def _process(scores: Tensor, history: TokenHistory, path: tuple[int, ...]) -> Tensor:
    """Call the user's logits processors. One that fails ends its own request, not the step."""
    for processor in history.request.params.logits_processors:
        try:
            changed = processor([*history.output_tokens, *path], scores)
            if changed.shape != scores.shape:
                raise ValueError(f"returned logits of shape {tuple(changed.shape)}, not {tuple(scores.shape)}")
            scores = changed
        except Exception as error:
            history.error = f"a logits processor failed: {type(error).__name__}: {error}"
    return scores


def _bias(scores: Tensor, history: TokenHistory) -> Tensor:
    if history.request.params.logit_bias:
        tokens, bias = history.bias
        scores[tokens] += bias.to(scores.dtype)
    return scores


def _penalise(scores: Tensor, history: TokenHistory, path: tuple[int, ...]) -> Tensor:
    p = history.request.params
    if p.repetition_penalty != 1:
        lowered = torch.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
        scores = torch.where(history.seen(path), lowered, scores)
    if p.presence_penalty or p.frequency_penalty:
        counts = history.counts(path)
        scores = scores - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    return scores


def _without_forbidden(scores: Tensor, history: TokenHistory, path: tuple[int, ...], allowed: Tensor | None) -> Tensor:
    """Mask tokens in a copy, because a processor may keep a reference to the tensor it returned."""
    forced = _forced_thinking_end(history, path)
    masks = [_only(history, (forced,))] if forced is not None else [history.disallowed]
    masks += [None if allowed is None else ~allowed.to(scores.device)]
    kept = scores.clone()
    for mask in masks:
        if mask is not None:
            kept.masked_fill_(mask, float("-inf"))
    if forced is None and (few := forbidden_tokens(history, path)):
        kept[few] = float("-inf")
    return kept


def forbidden_tokens(history: TokenHistory, path: tuple[int, ...]) -> list[int]:
    """Return single tokens that may not come next."""
    p, found = history.request.params, list[int]()
    for length, runs in history.request.bad_words.items():
        found += runs.get(tuple(history.tail(length - 1, path)), ())
    if len(history.output_tokens) + len(path) < p.min_tokens:
        found += [*history.request.end_ids, *p.stop_token_ids]
    return found


def _only(history: TokenHistory, tokens: tuple[int, ...] | list[int]) -> Tensor:
    forbidden_tokens = torch.ones(history.vocab, dtype=torch.bool, device=history.device)
    forbidden_tokens[list(tokens)] = False
    return forbidden_tokens


def _forced_thinking_end(history: TokenHistory, path: tuple[int, ...]) -> int | None:
    """Return the next token of the end-of-thinking sequence if the thinking budget is used up."""
    thinking, budget = history.request.reasoning, history.request.params.thinking_budget
    if thinking is None or budget is None:
        return None
    text = [*history._tokens, *path]
    opened = _last(text, thinking.start_ids)
    if opened < 0 or _last(text[opened:], thinking.end_ids) >= 0:
        return None
    spent = text[opened + len(thinking.start_ids) :]
    return _due(spent, budget, thinking.end_ids)


def _due(spent: list[int], budget: int, closes: tuple[int, ...]) -> int | None:
    """Return the next token of `closes` after `spent`, which may already end with some of them; None within budget."""
    if len(spent) < budget:
        return None
    begun = next(n for n in range(len(closes) - 1, -1, -1) if tuple(spent[len(spent) - n :]) == closes[:n])
    return closes[begun]


def _last(text: list[int], words: tuple[int, ...]) -> int:
    """Return the start of the last occurrence of `words` in `text`, or -1."""
    for start in range(len(text) - len(words), -1, -1):
        if text[start] == words[0] and tuple(text[start : start + len(words)]) == words:
            return start
    return -1
