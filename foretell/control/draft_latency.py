"""Latency model of timed drafters: a price per draft, per level, per token, and per token to prefill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from foretell.types import DrafterTraits, Sequence, StepResult

from .latency_model import Fit, StepCostView
from .settings import LatencyTuning

# Key suffix of the costs of a drafter's trees, which may be drafted quite differently from its chains. Saved costs have
# it in their file format.
TREE_SUFFIX = ", trees"


class DraftPrices(NamedTuple):
    """Seconds of a draft, by what they depend on."""

    start: float  # per draft
    level: float  # per level of depth
    node: float  # per draft token, over all sequences
    token: float  # per token to prefill


class DraftCosts:
    """Learned prices of one drafter's chains or trees."""

    def __init__(
        self,
        cost_share: float,
        node_share: float = LatencyTuning.draft_node_share,
        like: DraftCosts | None = None,
        tuning: LatencyTuning = LatencyTuning(),
    ) -> None:
        """`cost_share` is the prior time of a one-token draft over a plain step, `node_share` the part of that which
        grows with tokens. `like` has the prices to use until the first observation."""
        self.cost_share, self.node_share, self.tuning, self._like = cost_share, node_share, tuning, like
        self._fit: Fit | None = None
        self._prices: DraftPrices | None = None
        self._num_drafts = 0

    def prices(self, plain_seconds: float) -> DraftPrices:
        """Return the prices; before the first observation the prior, which is relative to a plain step."""
        if self._prices is None:
            if self._like is not None:
                return self._like.prices(plain_seconds)
            start_share = self.tuning.draft_start_share
            one_token = max(self.cost_share * plain_seconds, 1e-9)
            return DraftPrices(
                start=start_share * one_token,
                level=(1 - start_share - self.node_share) * one_token,
                node=self.node_share * one_token,
                token=self.tuning.draft_prefill_share * one_token,
            )
        return self._prices

    def seconds(self, depth: int, nodes: int, prefill: int, plain_seconds: float) -> float:
        """Return the expected seconds of a draft."""
        start, level, node, token = self.prices(plain_seconds)
        return (start if nodes else 0.0) + level * depth + node * nodes + token * prefill

    def observe(self, depth: int, nodes: int, prefill: int, seconds: float, plain_seconds: float) -> None:
        """Update the prices with a measured draft."""
        tuning = self.tuning
        self._num_drafts += 1
        if self._num_drafts > tuning.warm_steps and not prefill and self._num_drafts % tuning.draft_subsample:
            return
        if self._fit is None:
            mean = np.array(self.prices(plain_seconds))
            self._fit = Fit(mean, np.outer(mean, mean) * tuning.pace**2 + np.diag(mean**2), tuning)
        self._fit.observe(np.array([1, depth, nodes, prefill], float), seconds)
        self._refresh()

    def _refresh(self) -> None:
        assert self._fit is not None, "something was observed"
        self._prices = DraftPrices(*self._fit.mean.tolist())

    def dump(self) -> dict[str, Any]:
        """Return the prices as plain values."""
        return {} if self._fit is None else self._fit.dump()

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from saved prices."""
        found = Fit.load(saved, len(DraftPrices._fields), self.tuning)
        if found is not None:
            self._fit = found
            self._refresh()


class DraftLatency:
    """Prices of all drafters, and how many tokens of each sequence a drafter has in its KV cache."""

    def __init__(self, traits: Mapping[str, DrafterTraits], tuning: LatencyTuning = LatencyTuning()) -> None:
        self.traits, self.tuning = dict(traits), tuning
        in_trees, in_chains = tuning.draft_node_share_trees, tuning.draft_node_share
        self.costs = {
            name: DraftCosts(each.relative_cost, in_trees if each.makes_trees else in_chains, tuning=tuning)
            for name, each in traits.items()
        }
        with_trees = [name for name, each in traits.items() if each.makes_trees and not each.is_free]
        self.costs |= {
            name + TREE_SUFFIX: DraftCosts(traits[name].relative_cost, in_trees, self.costs[name], tuning)
            for name in with_trees
        }
        self.free = frozenset(name for name, each in traits.items() if each.is_free)
        self._prefilled: dict[int, dict[str, int]] = {}  # tokens by sequence and drafter

    def is_timed(self, drafter: str) -> bool:
        """Return whether drafts of this drafter take time that must be weighed."""
        return drafter in self.traits and drafter not in self.free

    def prefill_tokens(self, seq: Sequence, drafter: str) -> int:
        """Return the tokens that a drafter must prefill before it can draft."""
        if not self.traits[drafter].needs_prefill:
            return 0
        return len(seq.tokens) - self._prefilled.get(seq.id, {}).get(drafter, 0)

    def costs_of(self, drafter: str, tree: bool) -> DraftCosts:
        """Return the costs of a drafter's trees or of its chains."""
        return self.costs.get(drafter + TREE_SUFFIX, self.costs[drafter]) if tree else self.costs[drafter]

    def sequence_seconds(
        self, view: StepCostView, seq: Sequence, drafter: str, is_new: bool, tree: bool = False
    ) -> Callable[[int, int], float]:
        """Return a sequence's share of drafting as a function of nodes and depth, if all sequences draft alike."""
        start, level, node, token = self.costs_of(drafter, tree).prices(view.plain_seconds)
        # Prefill is spread over the output tokens it will serve. Start and levels are shared by the batch.
        tuning = self.tuning
        horizon = max(1, min(seq.remaining_tokens, tuning.prefill_horizon_new if is_new else tuning.prefill_horizon))
        fixed = token * self.prefill_tokens(seq, drafter) / horizon
        fixed += (start - view.hidden_gap) / view.num_decoding
        level = level / view.num_decoding
        return lambda nodes, depth: fixed + level * depth + node * nodes

    def probe_seconds(self, view: StepCostView, seq: Sequence, drafter: str, nodes: int) -> float:
        """Return the seconds of one probe of a drafter, prefill included."""
        return self.costs[drafter].seconds(nodes, nodes, self.prefill_tokens(seq, drafter), view.plain_seconds)

    def token_seconds(self, view: StepCostView, drafter: str) -> float:
        """Return a sequence's share of a draft of one token, if all sequences draft."""
        if drafter in self.free:
            return 0.0
        return self.costs[drafter].seconds(1, view.num_decoding, 0, view.plain_seconds) / view.num_decoding

    def min_probability(
        self, view: StepCostView, seq: Sequence, drafter: str, tree: bool = False, padding: bool = False
    ) -> float:
        """Return the probability below which one more token on a branch does not pay, so that the drafter stops there.

        A token of a tree pays for its row and for itself; its level is there anyway. A token that only fills a padded
        step (`padding`) pays for its attention over the context alone. A chain that is drafted in a single graph is
        paid for to its end, so its tokens pay for their rows alone.
        """
        if drafter in self.free:
            return 0.0
        full_row = view.extra_seconds(view.num_decoding) / view.num_decoding
        row = view.row_context_seconds if padding else full_row
        prices = self.costs_of(drafter, tree).prices(view.plain_seconds)
        if tree:
            own = prices.node
        else:
            own = 0.0 if self._is_single_graph(drafter, seq) else prices.node + prices.level / view.num_decoding
        factor = self.tuning.min_probability_factor
        return min(self.tuning.max_min_probability, factor * (own + row) * view.num_decoding / view.plain_seconds)

    def observe(self, results: list[StepResult], seconds: float | None, plain_seconds: float) -> None:
        """Update the costs with the drafts of one step. `seconds` is None for an outlier step.

        Steps with several drafters, or with both trees and chains, are skipped: their times cannot be separated.
        """
        timed = [
            each for each in results if each.scheduled.budget.nodes and self.is_timed(each.scheduled.budget.drafter)
        ]
        nodes = sum([len(result.draft) for result in timed])
        if not nodes:
            return
        shapes = {(result.scheduled.budget.drafter, result.scheduled.budget.is_tree) for result in timed}
        if len(shapes) != 1:
            return
        ((drafter, tree),) = shapes
        prefill = 0
        if self.traits[drafter].needs_prefill:
            prefill = sum([self._update_prefilled(result, drafter) for result in timed])
        depth = max([self._drafted_levels(result, drafter) for result in timed])
        if seconds is not None:
            self.costs_of(drafter, tree).observe(depth, nodes, prefill, seconds, plain_seconds)

    def _drafted_levels(self, result: StepResult, drafter: str) -> int:
        """Return the levels that were drafted, those that were cut off afterwards included."""
        scheduled = result.scheduled
        if self._is_single_graph(drafter, scheduled.seq):
            return scheduled.budget.depth
        return max(result.draft.depths(), default=0)

    def _is_single_graph(self, drafter: str, seq: Sequence) -> bool:
        """Return whether a drafter runs all levels of a draft at once, before the host sees any of them."""
        traits = self.traits[drafter]
        sampled = seq.request.params.temperature > 0 and seq.request.rule != "match"
        return traits.single_graph and (traits.samples_single_graph or not sampled)

    def _update_prefilled(self, result: StepResult, drafter: str) -> int:
        """Record that a drafter has prefilled a sequence, and return the tokens that were new to it."""
        prefilled = self._prefilled.setdefault(result.scheduled.seq.id, {})
        before, prefilled[drafter] = prefilled.get(drafter, 0), result.scheduled.length
        return result.scheduled.length - before

    def forget_drafter(self, drafter: str) -> None:
        """Drop what a drafter had prefilled, because it was unloaded."""
        for prefilled in self._prefilled.values():
            prefilled.pop(drafter, None)

    def forget(self, seq_id: int) -> None:
        """Drop a finished sequence."""
        self._prefilled.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._prefilled)
