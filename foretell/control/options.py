"""Options of each sequence for the choice: what drafters offer, its acceptance and prices, and the step's costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from foretell.types import Draft, DrafterTraits, Sequence

from .acceptance_model import FIRST_TOKEN, RequestAcceptance
from .choice import DrafterOption, StepCostView
from .draft_latency import TREE_SUFFIX, DraftLatency, HostGap
from .latency_model import StepCosts
from .settings import MAX_TREE_ROWS, ControllerSettings, ControllerTuning


class OptionBuilder:
    """Asks the models for all that `choose` needs."""

    def __init__(
        self,
        settings: ControllerSettings,
        costs: StepCosts,
        draft_latency: DraftLatency,
        host_gap: HostGap,
        tuning: ControllerTuning = ControllerTuning(),
    ) -> None:
        self.settings, self.costs, self.draft_latency, self.tuning = settings, costs, draft_latency, tuning
        self.host_gap, self.traits = host_gap, draft_latency.traits
        self._makes_trees = bool(settings.max_tree_nodes) and any(map(self._may_make_trees, self.traits.values()))

    def _may_make_trees(self, traits: DrafterTraits) -> bool:
        return traits.makes_trees and not traits.is_free

    def free(self, seq: Sequence, request: RequestAcceptance, free_drafts: Mapping[str, Draft]) -> list[DrafterOption]:
        """Return the drafts that free drafters offer, and note their confidence for timed drafters."""
        if not free_drafts:
            request.free_confidence = 0.0
            return []
        limit = self.settings.max_length(seq)
        found = [
            DrafterOption(name, request.free_probs(name, draft.truncate(limit)))
            for name, draft in free_drafts.items()
            if name in self.draft_latency.free
        ]
        request.free_confidence = max([each.accept_probs[0] for each in found if each.accept_probs], default=0.0)
        return found

    def timed(self, view: StepCostView, seq: Sequence, request: RequestAcceptance) -> list[DrafterOption]:
        """Return the expected drafts of timed drafters, as chains and, where they make them, as trees."""
        limit, latency, tuning = self.settings.max_length(seq), self.draft_latency, self.tuning
        options = []
        for name in seq.request.drafters:
            if name in latency.free:
                continue
            is_new = request.rates[name].group.trials[FIRST_TOKEN] < tuning.new_drafter_tokens
            length = min(limit, tuning.new_drafter_tokens) if is_new else limit
            prices = latency.costs[name].prices(view.plain_seconds)
            prefill = 0.0
            if tokens := latency.prefill_tokens(seq, name):  # spread over the tokens that it will serve
                horizon = tuning.prefill_horizon // 4 if is_new else tuning.prefill_horizon
                prefill = prices.token * tokens / max(1, min(seq.remaining_tokens, horizon))
            probs = request.chain_probs(name, length)
            if is_new or not self._makes_trees or not self.traits[name].makes_trees:
                options.append(DrafterOption(name, probs, prices, prefill))
                continue
            nodes = self.settings.max_nodes(seq, view.num_decoding)
            tree_prices = latency.costs[name + TREE_SUFFIX].prices(view.plain_seconds)
            level_probs = partial(request.level_probs, name, length)
            options.append(DrafterOption(name, probs, prices, prefill, nodes, tree_prices, level_probs))
        return options

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
        if self._makes_trees:
            most = max(most, min(self.settings.max_tree_nodes, MAX_TREE_ROWS // max(1, num_decoding)))
        return StepCostView(
            num_decoding=num_decoding,
            rows=rows,
            curve=costs.curve(rows + num_decoding * most),
            context_seconds=costs.context_seconds(cached),
            row_context_seconds=costs.pair_seconds * cached / len(seqs),  # each row attends to its own sequence
            host_gap=gap.seconds(num_decoding) + gap.host_seconds,
            hidden_gap=gap.hidden_seconds(num_decoding),
            padded_sizes=costs.sizes if rows == 1 else (),
        )
