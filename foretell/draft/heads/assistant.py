"""Drafts of Gemma 4's `assistant`, which attends to the target's own KV and has no cache."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend_chains
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.eagle import TreeLayout, expand_trees
from foretell.draft.heads.hidden_states import accepted_hidden_states
from foretell.draft.heads.sampling import DraftTemperature, TreeInProgress
from foretell.models.draft_heads import AssistantHead
from foretell.runner.heads.assistant import AssistantSteps
from foretell.runner.heads.kv import HeadPages
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence, StepResult


class AssistantDrafter(HeadDrafter):
    """An assistant needs one hidden state per sequence, that of its last cached position, and the target's pages."""

    head: AssistantHead

    def __init__(
        self,
        runner: ModelRunner,
        head: AssistantHead,
        pages: HeadPages,
        name: str,
        draft_temperature: DraftTemperature = "fixed",
        min_confidence: float = 0.0,
        single_graph: bool | None = None,
    ) -> None:
        """`single_graph` is of other heads: an assistant is never one CUDA graph."""
        super().__init__(runner, head, pages, name, draft_temperature, min_confidence, False)
        self._states: dict[int, tuple[int, Tensor]] = {}  # by sequence id: cached positions, and the last one's state

    def _update_kv(self, results: list[StepResult]) -> None:
        for result in results:
            seq, start = result.scheduled.seq, result.scheduled.start
            count = seq.num_computed_tokens - start
            if seq.finish_reason is not None:
                self._states.pop(seq.id, None)
            elif count > 0:
                states, begin, end = accepted_hidden_states(result, count - 1, count)[-1]
                row = states[begin:end]  # of a whole step, which must not be kept
                columns = self._columns
                self._states[seq.id] = start + count, row.clone() if columns is None else row.index_select(1, columns)

    def _can_draft(self, seq: Sequence, budget: Budget) -> bool:
        cached, _ = self._states.get(seq.id, (0, None))
        is_current = seq.pending == 1 and 0 < cached == seq.num_computed_tokens
        return is_current and 0 < budget.depth <= self.context - len(seq.tokens)

    def _take_pending(self, seq: Sequence) -> PrefillRange | None:
        return None

    def prefill(self, ranges: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        """Do nothing: there is no KV."""

    def draft_chains(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains, steps = self.new_chains(budgets), self._steps(seqs)
        tokens = [seq.tokens[-1] for seq in seqs]
        for offset in range(max(budget.depth for budget in budgets)):
            drafted = self.sample(seqs, offset, steps.chain_step(tokens))
            if not extend_chains(chains, drafted):
                break
            tokens = drafted.tokens
        return chains

    def draft_trees(self, growing: list[TreeInProgress]) -> None:
        seqs = [each.seq for each in growing]
        expand_trees(growing, AssistantTreeSteps(self._steps(seqs)), self.child_sampler)

    def _steps(self, seqs: list[Sequence]) -> AssistantSteps:
        hidden = torch.cat([self._states[seq.id][1] for seq in seqs])
        return AssistantSteps(self.head, self._runner.cache, seqs, hidden)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._states.pop(seq.id, None)


class AssistantTreeSteps:
    """The steps of an assistant for trees: one row per node, all at the position of the root."""

    def __init__(self, steps: AssistantSteps) -> None:
        self.steps = steps
        self.index: dict[int, int] = {}  # of each layout, by identity

    def root(self, layouts: list[TreeLayout]) -> Tensor:
        self.index = {id(each): i for i, each in enumerate(layouts)}
        return self.steps.chain_step([each.seq.tokens[-1] for each in layouts])

    def level(self, live: list[TreeLayout], parent_rows: list[int]) -> Tensor:
        tokens = [token for each in live for token in each.tokens]
        owners = [self.index[id(each)] for each in live for _ in each.tree.frontier]
        return self.steps.tree_step(tokens, owners, parent_rows)
