"""Fault barrier between engine and drafters: a failure or an invalid draft costs its draft tokens and no request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.supervisor import check_probs, comes_from_signal, is_builtin
from foretell.sampling.grammar_matcher import GrammarMatcher
from foretell.types import NO_DRAFT, Budget, DeviceDraft, Draft, ScheduledSequence, Sequence, StepResult


def validate_draft(draft: Draft, budget: Budget, vocab: int, trusted: bool = False) -> Draft:
    """Return a draft cut to its budget, under its drafter's name; raise if the target cannot verify it.

    The mix has checked the form of the draft. Probabilities of a `trusted` drafter are taken to be distributions.
    """
    if draft is NO_DRAFT or budget.nodes <= 0:
        return NO_DRAFT
    name = budget.drafter or draft.source or "a drafter without a name"
    draft = draft.truncate(budget.nodes)
    if draft.device_draft is not None and not budget.on_device:
        raise ValueError(f"{name} left its draft tokens on a device, which this step does not allow")
    if budget.is_tree:
        max_depth, depths = budget.depth, draft.depths()
        if max(depths, default=0) > max_depth:
            draft = draft.subset([node for node, depth in enumerate(depths) if depth <= max_depth])
    if not len(draft):
        return NO_DRAFT
    draft = deduplicate(draft)
    if budget.drafter and draft.source != budget.drafter:
        draft = replace(draft, source=budget.drafter)
    if draft.device_draft is not None:  # the device reads the tokens from its own buffer, which holds valid ones
        return draft
    if min(draft.tokens) < 0 or max(draft.tokens) >= vocab:
        raise ValueError(f"{name} returned a token outside 0..{vocab - 1}")
    return check_probs(draft, vocab, name, trusted)


def deduplicate(draft: Draft) -> Draft:
    """Merge equal tokens under one parent into the first of them, with the subtrees below them.

    A sampled draft token keeps its own node: it is a separate sample, verified by the probabilities it came from.
    """
    if draft.is_chain or len({*zip(draft.parents, draft.tokens, strict=True)}) == len(draft):
        return draft
    first: dict[tuple[int, int], int] = {}
    merged_into = list(range(len(draft)))
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        key = (merged_into[parent] if parent >= 0 else parent, token)
        if not draft.is_sampled(node):
            merged_into[node] = first.get(key, node)
        first.setdefault(key, node)
    parents = tuple(merged_into[parent] if parent >= 0 else parent for parent in draft.parents)
    return replace(draft, parents=parents).subset([node for node, other in enumerate(merged_into) if other == node])


MIX = "mix"  # name under which failures of the mix itself are counted, apart from those of its drafters

Result = TypeVar("Result")


class SafeDrafter:
    """The engine's access to its drafters. Where a call fails, the step goes on without the result."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab = MixDrafter.of(drafter), vocab
        self.supervisor = self.drafter.supervisor
        traits = {name: each.traits for name, each in self.drafter.drafters.items()}
        self.learning_drafters = frozenset(name for name, each in traits.items() if each.top_k)
        self.copying_drafters = frozenset(name for name, each in traits.items() if each.is_free and not each.top_k)
        self.top_k, self.hidden_layers = self.drafter.traits.top_k, self.drafter.traits.hidden_layers
        self._trusted = all(map(is_builtin, self.drafter.drafters.values()))

    @property
    def failures(self) -> int:
        """Return the failed calls of all drafters since the start."""
        return self.supervisor.failures.total()

    @property
    def health(self) -> dict[str, tuple[int, bool]]:
        """Return for each drafter its failures since the start, and whether it is disabled now."""
        failures, disabled = self.supervisor.failures.copy(), self.supervisor.disabled
        return {name: (failures[name], name in disabled) for name in (*self.drafter.drafters, *failures)}

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> dict[int, Mapping[str, Draft]]:
        """Return the drafts of free drafters, by sequence id and drafter."""
        if not seqs:
            return {}
        none: list[Mapping[str, Draft]] = [{}] * len(seqs)
        found = self._call("free_drafts", lambda: self.drafter.free_drafts(seqs, nodes), none)
        return {seq.id: drafts for seq, drafts in zip(seqs, found, strict=True)}

    def propose(self, scheduled: list[ScheduledSequence], budgets: list[Budget]) -> list[Draft]:
        """Return a valid draft, perhaps empty, for each scheduled sequence."""
        none = [NO_DRAFT] * len(scheduled)
        if not any(budget.nodes for budget in budgets):
            return none
        seqs = [each.seq for each in scheduled]
        drafts = self._call("propose", lambda: self.drafter.propose(seqs, budgets), none)
        return [self._validate(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]

    def _validate(self, draft: Draft, budget: Budget) -> Draft:
        """Return the draft, or an empty one if it is invalid."""
        name = budget.drafter or self.drafter.name
        try:
            draft = validate_draft(draft, budget, self.vocab, self._trusted)
        except BaseException as error:
            if comes_from_signal(error):
                raise
            self.supervisor.fail(name, "draft", error)
            return NO_DRAFT
        if len(draft):
            self.supervisor.succeed(name, "draft")
        return draft

    def fetch_device_drafts(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts with tokens that were still on the device; tokens that cannot be fetched are rejected."""
        return [draft if draft.device_draft is None else self._fetch(draft, draft.device_draft) for draft in drafts]

    def _fetch(self, draft: Draft, device_draft: DeviceDraft) -> Draft:
        nodes, none = len(draft), (list[int](), list[float]())
        name = draft.source if draft.source in self.drafter.drafters else self.drafter.name
        tokens, confidence = self.supervisor.call(name, "wait", device_draft.wait, none, always=True)
        if len(tokens) < nodes:  # the placeholders are negative, and no target token equals one
            return replace(draft, device_draft=None)
        return replace(draft, tokens=tuple(tokens[:nodes]), confidence=tuple(confidence[:nodes]), device_draft=None)

    def prepare(self, seqs: list[Sequence]) -> None:
        """Let drafters work ahead for these sequences while the device prefills them."""
        self._call("prepare", lambda: self.drafter.prepare(seqs), None)

    def update_kv(self, results: list[StepResult]) -> None:
        """Let drafters that read hidden states update their KV for every sequence: its pages may be shared."""
        if self.hidden_layers:
            self._call("update_kv", lambda: self.drafter.update_kv(results), None, always=True)

    def observe(self, results: list[StepResult]) -> None:
        """Let drafters learn from the results."""
        if results:
            self._call("observe", lambda: self.drafter.observe(results), None)

    def forget(self, seq: Sequence) -> None:
        """Let drafters drop the state of a finished sequence."""
        if seq.request.drafters or self.hidden_layers:  # otherwise no drafter has state for it
            self._call("forget", lambda: self.drafter.forget(seq), None, always=True)

    def _call(self, method: str, do: Callable[[], Result], otherwise: Result, always: bool = False) -> Result:
        return self.supervisor.call(MIX, method, do, otherwise, always)


GRAMMAR = "grammar"  # source of draft tokens that a grammar forces


def apply_grammar(draft: Draft, matcher: GrammarMatcher, budget: Budget) -> Draft:
    """Return the tokens that the grammar forces, if any; else the draft up to its first forbidden token.

    A forbidden token that was sampled stays, to be rejected with its residual: to drop it would bias the output.
    A tree stays as it is, because the verifier's token masks reject its forbidden nodes.
    """
    if budget.nodes and (forced := matcher.forced_tokens(budget.nodes)):
        return replace(Draft.chain(forced, GRAMMAR), confidence=(1.0,) * len(forced))
    if not draft.is_chain:
        return draft
    num_legal = matcher.count_allowed(draft.tokens)
    keeps_next = num_legal < len(draft) and draft.is_sampled(num_legal)
    return draft.truncate(num_legal + 1 if keeps_next else num_legal)
