"""Options of each sequence for the choice: what drafters offer, its acceptance and prices, and the step's costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from foretell.types import Budget, Draft, Sequence

from .acceptance_model import FIRST_TOKEN
from .choice import DrafterOption, StepCostView
from .draft_latency import TREE_SUFFIX, DraftLatency, HostGap
from .latency_model import StepCosts
from .sequence_history import SequenceHistory
from .settings import MAX_TREE_ROWS, ControllerSettings, ControllerTuning


class OptionBuilder:
    """Asks the models for all that `choose` needs."""

    def __init__(
        self,
        settings: ControllerSettings,
        costs: StepCosts,
        draft_latency: DraftLatency,
        host_gap: HostGap,
        tuning: ControllerTuning,
    ) -> None:
        self.settings, self.costs, self.draft_latency, self.tuning = settings, costs, draft_latency, tuning
        self.host_gap, self.traits, self._free = host_gap, draft_latency.traits, draft_latency.free
        tree_makers = [name for name, each in self.traits.items() if each.makes_trees and not each.is_free]
        self._tree_makers = frozenset(tree_makers if settings.max_tree_nodes else ())
        self._has_timed = len(self._free) < len(self.traits)

    def view(self, seqs: list[Sequence]) -> StepCostView:
        """Return the costs of the next step with these sequences."""
        num_decoding = rows = cached = 0
        max_prompt_rows = self.tuning.max_prompt_rows
        for seq in seqs:
            pending = len(seq.tokens) - seq.num_computed_tokens
            num_decoding += pending == 1
            rows += pending if pending < max_prompt_rows else max_prompt_rows
            cached += seq.num_computed_tokens
        most, costs, gap = self.settings.max_draft_tokens, self.costs, self.host_gap
        if self._tree_makers:
            most = max(most, min(self.settings.max_tree_nodes, MAX_TREE_ROWS // max(1, num_decoding)))
        return StepCostView(
            num_decoding=num_decoding,
            rows=rows,
            curve=costs.curve(rows + num_decoding * most),
            context_seconds=costs.token_seconds * cached,
            row_context_seconds=costs.pair_seconds * cached / len(seqs),  # each row attends to its own sequence
            host_gap=gap.seconds(num_decoding) + gap.host_seconds,
            hidden_gap=gap.hidden_seconds(num_decoding),
            padded_sizes=costs.sizes if rows == 1 else (),
        )

    def of(
        self, view: StepCostView, state: SequenceHistory, free_drafts: Mapping[str, Draft] | None
    ) -> list[DrafterOption]:
        """Return the options of a sequence; `free_drafts` is None if its free drafters were not polled.

        The confidence of free drafts is noted for timed drafters.
        """
        acceptance, limit = state.acceptance, state.limit
        acceptance.free_confidence, found = None, []
        if free_drafts is not None:
            for name, draft in free_drafts.items():
                if name in self._free:
                    found.append(DrafterOption(name, acceptance.free_probs(name, draft.truncate(limit))))
            acceptance.free_confidence = max([each.accept_probs[0] for each in found if each.accept_probs], default=0.0)
        for name in state.seq.request.drafters if self._has_timed else ():
            if name not in self._free:
                found.append(self._timed(view, state, name, limit))
        return found

    def _timed(self, view: StepCostView, state: SequenceHistory, name: str, limit: int) -> DrafterOption:
        """Return the expected drafts of a timed drafter, as chains and, if it makes them, as trees."""
        acceptance, tuning, costs = state.acceptance, self.tuning, self.draft_latency.costs
        is_new = acceptance.rates[name].group.trials[FIRST_TOKEN] < tuning.new_drafter_tokens
        length = min(limit, tuning.new_drafter_tokens) if is_new else limit
        prices, prefill = costs[name].prices(view.plain_seconds), 0.0
        if tokens := self.prefill_tokens(state, name):  # spread over the tokens that it will serve
            horizon = tuning.prefill_horizon // 4 if is_new else tuning.prefill_horizon
            prefill = prices.token * tokens / max(1, min(state.seq.remaining_tokens, horizon))
        # Looking has a limit: a request whose drafts have lost so much of its time pays for no more optimism.
        is_optimistic = state.lost_steps < tuning.optimism_share * state.seq.request.max_tokens
        probs = acceptance.chain_probs(name, length, is_optimistic)
        if is_new or name not in self._tree_makers:
            return DrafterOption(name, probs, prices, prefill)
        nodes, tree_prices = self.settings.max_nodes(state.seq, view.num_decoding), costs[name + TREE_SUFFIX]
        level_probs = partial(acceptance.level_probs, name, length)
        return DrafterOption(name, probs, prices, prefill, nodes, tree_prices.prices(view.plain_seconds), level_probs)

    def prefill_tokens(self, state: SequenceHistory, drafter: str) -> int:
        """Return the tokens that a drafter must prefill before it can draft."""
        return len(state.seq.tokens) - state.prefilled.get(drafter, 0) if self.traits[drafter].needs_prefill else 0

    def fixed(
        self,
        state: SequenceHistory,
        free_drafts: Mapping[str, Draft],
        length: int,
        unavailable: frozenset[str],
        count: int,
    ) -> Budget:
        """Return a budget of a fixed length, by the drafter with the most expected accepted tokens."""
        seq, acceptance, length = state.seq, state.acceptance, min(length, state.limit)
        expected = {"": 0.0}
        for drafter in seq.request.drafters:
            if drafter in unavailable:
                continue
            if drafter not in self._free:
                expected[drafter] = sum(acceptance.chain_probs(drafter, length, optimistic=False))
            elif len(seq.request.drafters) == 1:
                expected[drafter] = 1.0
            elif drafter in free_drafts:
                expected[drafter] = sum(acceptance.free_probs(drafter, free_drafts[drafter].truncate(length)))
        drafter = max(expected, key=expected.__getitem__) if length else ""
        if not drafter:
            return Budget()
        nodes = self.settings.max_nodes(seq, count) if self.traits[drafter].makes_trees else 0
        return Budget(nodes, drafter, max_depth=length) if nodes > length else Budget(length, drafter)

    def break_even(self, view: StepCostView, states: list[SequenceHistory]) -> dict[str, tuple[float, float]]:
        """Return the acceptance rate of first tokens and the one at which they pay, by drafter."""
        found = {}
        for name in sorted({name for state in states for name in state.acceptance.rates}):
            rates = [state.acceptance.rates[name].group for state in states if name in state.acceptance.rates]
            ((group, _),) = Counter(rates).most_common(1)
            prices = None if name in self._free else self.draft_latency.costs[name].prices(view.plain_seconds)
            found[name] = group.rate(FIRST_TOKEN), view.break_even(prices)
        return found
