"""A set of drafters with one interface: the budget of a sequence names the drafter that drafts for it.

The engine always holds a mix. A single drafter is a mix of one, and no drafter is an empty mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeVar

import torch

from foretell.draft.base import Drafter, HiddenStateDrafter, check_traits
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.sampling import needs_draft_probs
from foretell.draft.heads.tree import ROOT
from foretell.draft.idle_unload import UnloadableDrafter
from foretell.draft.supervisor import Supervisor, check_drafts
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult

CONFIDENT = 0.8  # confidence of a first draft token from which drafters with `defers_to_confident` are not asked
DEFAULT_CONFIDENCE = 0.5  # of a draft token whose drafter gives none, when drafts are merged
UNSAMPLED_SHARE = 4  # 1 node in 4 goes to each drafter that does not sample, next to one that does

Result = TypeVar("Result")


class MergedDrafter(Drafter):
    """Several drafters under one name, `a+b`: their drafts become one tree.

    It has no `propose` of its own. The mix asks each part through the supervisor and passes their drafts to `merge`.
    """

    def __init__(self, name: str, parts: Values[Drafter]) -> None:
        self.name, self.parts = name, tuple(part.name for part in parts)
        self._sampling = frozenset(part.name for part in parts if part.traits.samples)
        traits = [part.traits for part in parts]
        self.traits = DrafterTraits(
            samples=bool(self._sampling),
            gives_probability=any(each.gives_probability for each in traits),
            makes_trees=True,
            single_graph=any(each.single_graph for each in traits),
            samples_single_graph=any(each.single_graph and each.samples_single_graph for each in traits),
            is_free=all(each.is_free for each in traits),
            needs_prefill=any(each.needs_prefill for each in traits),
            relative_cost=sum(each.relative_cost for each in traits if not each.is_free),
            prior_acceptance=max(each.prior_acceptance for each in traits),
        )

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        raise NotImplementedError("the mix asks the parts of a merged drafter one by one")

    def budget(self, part: str, seq: Sequence, budget: Budget) -> Budget:
        """Return the budget of one part. Where drafts are sampled, only the first sampling part drafts: two samples of
        one position could not both be verified by their probabilities."""
        if not needs_draft_probs(seq) or not self._sampling:
            return replace(budget, drafter=part)
        sampling = next(name for name in self.parts if name in self._sampling)
        unsampled = budget.nodes // UNSAMPLED_SHARE
        if part != sampling:
            return Budget() if part in self._sampling else replace(budget, nodes=unsampled, drafter=part)
        others = sum(name not in self._sampling for name in self.parts)
        return replace(budget, nodes=max(1, budget.nodes - unsampled * others), drafter=part)

    def merge(self, seq: Sequence, budget: Budget, drafts: Values[Draft]) -> Draft:
        """Return the drafts of all parts as one draft within the budget."""
        drafts = [draft for draft in drafts if len(draft)]
        return merge_drafts(drafts, budget.nodes, self.name, needs_draft_probs(seq)) if drafts else NO_DRAFT


class MixDrafter(Drafter):
    """Keeps a set of drafters up to date and asks the one that a budget names.

    Every call goes through the supervisor, so a drafter that fails costs its own drafts and no others.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter],
        default_drafters: tuple[str, ...] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`default_drafters` draft for a request that names none; by default all of them."""
        every = list(drafters)
        for drafter in every:
            check_traits(drafter)
        self.drafters: Mapping[str, Drafter] = {drafter.name: drafter for drafter in every}
        assert len(self.drafters) == len(every), "drafters have distinct names"
        self.default_drafters = tuple(self.drafters) if default_drafters is None else default_drafters
        self.supervisor = supervisor or Supervisor()
        self.merged = {drafter.name: drafter for drafter in every if isinstance(drafter, MergedDrafter)}
        self.heads = {drafter.name: drafter for drafter in every if isinstance(drafter, HeadDrafter)}  # can be replaced
        self._unloadable = {drafter.name: drafter for drafter in every if isinstance(drafter, UnloadableDrafter)}
        self._with_kv = {
            drafter.name: drafter
            for drafter in every
            if isinstance(drafter, HiddenStateDrafter) and drafter.traits.hidden_layers
        }
        self._preparing = [drafter for drafter in every if _overrides(drafter.prepare, Drafter.prepare)]
        self._learning = [drafter for drafter in every if _overrides(drafter.observe, Drafter.observe)]
        free = [(drafter.name, drafter.traits.defers_to_confident) for drafter in every if drafter.traits.is_free]
        self._free = sorted(free, key=itemgetter(1))  # those that defer to a confident one come last
        # By sequence id the last free drafts: for which length, of how many nodes at most, by drafter.
        self._free_drafts: dict[int, tuple[int, int, Mapping[str, Draft]]] = {}
        self._only = every[0].name if len(every) == 1 else ""  # a budget for a mix of one need not name it
        self.traits = every[0].traits if len(every) == 1 else _combined([drafter.traits for drafter in every])
        self.name = "mix" if self.drafters else "none"
        if len(self.default_drafters) == 1:
            self.name = self.default_drafters[0]

    @classmethod
    def of(cls, drafter: Drafter) -> MixDrafter:
        """Return a mix as it is, and any other drafter as a mix of one."""
        return drafter if isinstance(drafter, MixDrafter) else MixDrafter([drafter])

    @property
    def unavailable(self) -> frozenset[str]:
        """Names of drafters that cannot draft now: their weights are unloaded, or they pause after failures."""
        disabled = self.supervisor.disabled
        if not self._unloadable:  # read in every step
            return disabled
        return disabled.union(name for name, drafter in self._unloadable.items() if not drafter.is_loaded)

    def is_loaded(self, name: str) -> bool:
        """Return whether the mix has a drafter of this name and its weights are loaded."""
        return name in self.drafters and (name not in self._unloadable or self._unloadable[name].is_loaded)

    def request_load(self, name: str) -> None:
        """Load the weights of a drafter again in the background, if they are unloaded."""
        if name in self._unloadable:
            self._unloadable[name].load()

    def kv_update(self, name: str) -> Callable[[list[StepResult]], None] | None:
        """Return the `update_kv` of a drafter that reads hidden states; None for any other drafter."""
        drafter = self._with_kv.get(name)
        return None if drafter is None else drafter.update_kv

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        """Return the drafts of free drafters for each sequence, by drafter; `propose` reuses them.

        A draft with sampled tokens is left out: a draft length chosen with it in sight would bias the output.
        """
        found: list[dict[str, Draft]] = [{} for _ in seqs]
        confident, budget = [False] * len(seqs), Budget(nodes)
        for name, defers in self._free:
            asked = [i for i, seq in enumerate(seqs) if name in seq.request.drafters and not (defers and confident[i])]
            if not asked:
                continue
            drafts = self._ask(name, [seqs[i] for i in asked], [budget] * len(asked))
            for i, draft in zip(asked, drafts, strict=True):
                if len(draft) and not any(draft.sampled or ()):
                    found[i][name] = draft
                    confident[i] |= draft.confidence is not None and draft.confidence[0] >= CONFIDENT
        for seq, by_drafter in zip(seqs, found, strict=True):
            self._free_drafts[seq.id] = (len(seq.tokens), nodes, by_drafter)
        return list(found)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        if not self.drafters:
            return [NO_DRAFT] * len(seqs)
        if self._only and not self._free:  # no draft is known yet, and one drafter makes them all
            return self._ask(self._only, seqs, budgets)
        drafts: list[Draft] = []
        missing: dict[str, list[int]] = {}  # by drafter
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            known = self._known_draft(seq, budget)
            drafts.append(known or NO_DRAFT)
            if known is None:
                missing.setdefault(budget.drafter or self._only, []).append(i)
        for name, asked in missing.items():
            proposed = self._ask(name, [seqs[i] for i in asked], [budgets[i] for i in asked])
            for i, draft in zip(asked, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def _known_draft(self, seq: Sequence, budget: Budget) -> Draft | None:
        """Return the free draft made before this step was scheduled; its first nodes are the draft of a smaller
        budget. None: the drafter has to be asked."""
        if not budget.nodes:
            return NO_DRAFT
        length, nodes, drafts = self._free_drafts.get(seq.id, (-1, 0, {}))
        if length != len(seq.tokens) or nodes < budget.nodes:
            return None
        draft = drafts.get(budget.drafter or self._only)
        return None if draft is None else draft.truncate(budget.nodes)

    def _ask(self, name: str, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        if (merged := self.merged.get(name)) is not None:
            return self._ask_parts(merged, seqs, budgets)

        def propose() -> list[Draft]:
            return check_drafts(self.drafters[name].propose(seqs, budgets), len(seqs), name)

        return self.supervisor.call(name, "propose", propose, [NO_DRAFT] * len(seqs))

    def _ask_parts(self, merged: MergedDrafter, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        """Ask the parts of a merged drafter and merge their drafts; a part that fails leaves the tree to the others."""
        if merged.name in self.supervisor.disabled:
            return [NO_DRAFT] * len(seqs)
        pairs = list(zip(seqs, budgets, strict=True))
        found = [self._ask(part, seqs, [merged.budget(part, *pair) for pair in pairs]) for part in merged.parts]

        def merge() -> list[Draft]:
            return [merged.merge(*pair, drafts) for pair, drafts in zip(pairs, zip(*found, strict=True), strict=True)]

        return self.supervisor.call(merged.name, "merge", merge, [NO_DRAFT] * len(seqs))

    def prepare(self, seqs: list[Sequence]) -> None:
        for drafter in self._preparing:
            own = [seq for seq in seqs if drafter.name in seq.request.drafters]
            if own:
                self._call(drafter, "prepare", drafter.prepare, own)

    def update_kv(self, results: list[StepResult]) -> None:
        """Let drafters that read hidden states update their KV; a paused one must not miss a step."""
        for drafter in self._with_kv.values():
            self._call(drafter, "update_kv", drafter.update_kv, results, always=True)

    def observe(self, results: list[StepResult]) -> None:
        for drafter in self._learning:
            self._call(drafter, "observe", drafter.observe, results)

    def forget(self, seq: Sequence) -> None:
        self._free_drafts.pop(seq.id, None)
        for drafter in self.drafters.values():
            self._call(drafter, "forget", drafter.forget, seq, always=True)

    def _call(
        self, drafter: Drafter, method: str, call: Callable[[Result], None], argument: Result, always: bool = False
    ) -> None:
        self.supervisor.call(drafter.name, method, lambda: call(argument), None, always)


def _overrides(method: Callable[..., None], default: Callable[..., None]) -> bool:
    """Return whether a drafter has a method of its own, in its class or on the instance."""
    return getattr(method, "__func__", None) is not default


def _combined(traits: list[DrafterTraits]) -> DrafterTraits:
    """Return what the engine must provide for drafters with these traits together."""
    return DrafterTraits(
        hidden_layers=tuple(sorted({layer for each in traits for layer in each.hidden_layers})),
        top_k=max((each.top_k for each in traits), default=0),
        samples=any(each.samples for each in traits),
        gives_probability=any(each.gives_probability for each in traits),
        weight_bytes=sum(each.weight_bytes for each in traits),
    )


@dataclass
class _TreeUnion:
    """The union of several drafts: a token appears once under its parent."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    path_confidence: list[float] = field(default_factory=list)  # product along the branch; the highest of all drafters
    origins: list[str] = field(default_factory=list)  # the first drafter that proposed a node
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # by parent and token

    def add(self, draft: Draft, max_nodes: int | None = None) -> None:
        """Add the nodes of a draft that are missing, up to `max_nodes` nodes in the union."""
        positions, confidence = {ROOT: ROOT}, {ROOT: 1.0}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            own = DEFAULT_CONFIDENCE if draft.confidence is None else min(1.0, draft.confidence[node])
            confidence[node] = confidence[parent] * own
            if parent not in positions:
                continue
            key = (positions[parent], token)
            if key not in self.nodes:
                if max_nodes is not None and len(self.tokens) >= max_nodes:
                    continue
                self.nodes[key] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(key[0])
                self.path_confidence.append(0.0)
                self.origins.append(draft.origin(node))
            positions[node] = self.nodes[key]
            self.path_confidence[positions[node]] = max(self.path_confidence[positions[node]], confidence[node])

    def draft(self, source: str) -> Draft:
        before = [1.0 if parent == ROOT else self.path_confidence[parent] for parent in self.parents]
        confidence = tuple(own / max(above, 1e-30) for own, above in zip(self.path_confidence, before, strict=True))
        return Draft(
            tuple(self.tokens), tuple(self.parents), source, confidence=confidence, origins=tuple(self.origins)
        )


def merge_drafts(drafts: Values[Draft], nodes: int, source: str, sampled: bool = False) -> Draft:
    """Merge drafts into one tree of at most `nodes` nodes.

    The path confidence of a node is the highest that any drafter gives it, so no node exceeds its parent and the most
    confident nodes form a tree. If drafts were `sampled`, to be verified by their probabilities, all sampled nodes stay
    and the others come after them: to drop a sampled token, or to try another one before it, would bias the output.
    """
    union = _TreeUnion()
    if sampled:
        drafts = sorted(drafts, key=lambda draft: not any(draft.sampled or ()))
    for draft in drafts:
        union.add(draft, nodes if sampled else None)
    tree = union.draft(source)
    if not sampled:
        order = sorted(range(len(tree)), key=lambda node: (-union.path_confidence[node], node))
        return tree.subset(order[:nodes])
    first = drafts[0]
    if first.sampled is None or first.probs is None:
        return tree
    added = len(tree) - len(first)
    rows = torch.cat([first.probs, first.probs.new_zeros(added, first.probs.shape[1])])
    return replace(tree, sampled=first.sampled + (False,) * added, probs=rows)
