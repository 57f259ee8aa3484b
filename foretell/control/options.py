"""Options of each sequence for the choice: what drafters offer, its acceptance and prices, and the step's costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from foretell.types import Draft, Sequence

from .acceptance_model import FIRST_TOKEN
from .choice import DrafterOption, StepCostView
from .host_gap import HostGap
from .latency_model import TREE_SUFFIX, DraftLatency, StepCosts
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
        self._shared: dict[object, list[DrafterOption]] = {}  # options of sequences without a free draft in this step

    def view(self, seqs: list[Sequence]) -> StepCostView:
        """Return the costs of the next step with these sequences."""
        num_decoding = rows = cached = 0
        for seq in seqs:
            pending = len(seq.tokens) - seq.num_computed_tokens
            num_decoding += pending == 1
            rows += min(pending, self.tuning.max_prompt_rows)
            cached += seq.num_computed_tokens
        most, costs, gap = self.settings.max_draft_tokens, self.costs, self.host_gap
        if self._tree_makers:
            most = max(most, min(self.settings.max_tree_nodes, MAX_TREE_ROWS // max(1, num_decoding)))
        self._shared.clear()
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

    def of(self, view: StepCostView, state: SequenceHistory, free_drafts: Mapping[str, Draft]) -> list[DrafterOption]:
        """Return the options of a sequence. Sequences with equal ones share the list."""
        drafters, limit = state.seq.request.drafters, state.limit
        free: list[DrafterOption] = []
        for name, draft in free_drafts.items():
            if name in state.rates and name in self._free:
                probs = state.rates[name].draft_probs(draft, limit)
                if state.has_timed:  # the largest of several estimates is too large (optimizer's curse)
                    probs = [self.tuning.free_discount * prob for prob in probs]
                free.append(DrafterOption(name, probs))
        if not state.has_timed:
            return free
        timed = [name for name in drafters if name not in self._free]
        prefill = [self.prefill_tokens(state, name) for name in timed]
        nodes = self.settings.max_nodes(state.seq, view.num_decoding)
        key = None if any(prefill) else (drafters, limit, nodes, id(state.rates[timed[0]]))
        found = self._shared.get(key) if key else None
        if found is None:
            found = [self._timed(view, state, *each, nodes) for each in zip(timed, prefill, strict=True)]
            if key:
                self._shared[key] = found
        return free + found if free else found

    def _timed(self, view: StepCostView, state: SequenceHistory, name: str, tokens: int, nodes: int) -> DrafterOption:
        """Return the drafts that a timed drafter could make: chains and, if it makes them, trees of so many nodes."""
        rates, tuning, costs = state.rates[name], self.tuning, self.draft_latency.costs
        is_new = rates.trials[FIRST_TOKEN] < tuning.new_drafter_tokens
        length = min(state.limit, tuning.new_drafter_tokens) if is_new else state.limit
        prices, prefill = costs[name].prices(view.plain_seconds), 0.0
        if tokens:  # spread over the tokens that it will serve
            horizon = tuning.prefill_horizon // 4 if is_new else tuning.prefill_horizon
            prefill = prices.token * tokens / max(1, min(state.seq.remaining_tokens, horizon))
        probs = rates.chain_probs(length)
        if is_new or name not in self._tree_makers:
            return DrafterOption(name, probs, prices, prefill)
        tree_prices = costs[name + TREE_SUFFIX].prices(view.plain_seconds)
        return DrafterOption(name, probs, prices, prefill, nodes, tree_prices, partial(rates.level_probs, length))

    def prefill_tokens(self, state: SequenceHistory, drafter: str) -> int:
        """Return the tokens that a drafter must prefill before it can draft."""
        return len(state.seq.tokens) - state.prefilled.get(drafter, 0) if self.traits[drafter].needs_prefill else 0

    def break_even(self, view: StepCostView, states: list[SequenceHistory]) -> dict[str, tuple[float, float]]:
        """Return the acceptance rate of first tokens and the one at which they pay, by drafter."""
        found = {}
        for name, rates in sorted({name: rates for state in states for name, rates in state.rates.items()}.items()):
            prices = None if name in self._free else self.draft_latency.costs[name].prices(view.plain_seconds)
            found[name] = rates.rate(FIRST_TOKEN), view.break_even(prices)
        return found
