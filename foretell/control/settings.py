"""Settings of the controller: options of the user, and all tuning constants in one frozen dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from foretell.types import Sequence

MAX_TREE_ROWS = 256  # tree nodes of all sequences in one step; beyond that every row costs its full price everywhere


class DrafterLoader(Protocol):
    """Knows which drafters are unloaded because their memory was given back, and can load them again."""

    @property
    def unavailable(self) -> frozenset[str]: ...

    def request_load(self, name: str) -> None: ...


@dataclass(frozen=True)
class ControllerSettings:
    """Limits of the controller, from the options of the user."""

    max_draft_tokens: int = 16  # of a chain, and the depth of a tree
    fixed_length: Callable[[int], int] | None = None  # draft length by batch size; None adapts it
    throughput: bool = False  # maximise tokens per second of the batch instead of each sequence's speed
    min_draft_tokens: int = 0  # shorter drafts are not verified
    margin: float = 0.01  # speedup over 1 that a draft must promise
    max_tree_nodes: int = 0  # of one sequence; 0 allows chains only

    def max_length(self, seq: Sequence) -> int:
        """Return the most draft tokens of a chain for a sequence."""
        wanted = seq.request.speculation.max_draft
        most = self.max_draft_tokens if wanted is None else min(self.max_draft_tokens, wanted)
        remaining = seq.remaining_tokens - 1  # the step adds the target's own token
        return max(0, most if most < remaining else remaining)

    def max_nodes(self, seq: Sequence, num_decoding: int) -> int:
        """Return the most nodes of a tree for one of `num_decoding` sequences."""
        wanted = seq.request.speculation.max_draft
        most = min(self.max_tree_nodes, MAX_TREE_ROWS // num_decoding)
        return most if wanted is None else min(most, wanted)


@dataclass(frozen=True)
class ControllerTuning:
    """All constants of the adaptive controller. They are not options; bench/ablation.py switches each off in turn."""

    # Acceptance, counted in draft tokens.
    memory: float = 100.0  # tokens over which counts decay: outputs, drafters and traffic change
    prior_weight: float = 12.0  # tokens that the prior of a cell counts for
    confidence_trust: float = 0.7  # weight of a free drafter's own confidence in the prior of a confidence bin
    free_discount: float = 0.8  # factor on the acceptance of free drafts where a timed drafter could draft instead
    optimistic_prior: float = 0.95  # acceptance of a timed drafter that was never measured: it is tried, then known
    # Latency. Noise and deviations are relative to a step.
    noise: float = 0.1  # assumed noise of one measurement
    outlier: float = 3.0  # residuals are clipped at this many medians
    drift: float = 0.002  # random walk of all costs per step: the machine changes
    pace: float = 0.5  # prior deviation of the overall pace, and after a lasting change of it; half for saved costs
    bend: float = 0.1  # prior deviation of the rows curve around a line
    slope: float = 3.0  # prior deviation of the cost of a row, over its prior mean
    warm_steps: int = 64  # updates before subsampling starts
    subsample: int = 32  # then steps of about the same rows are updates at most once in 32, since one costs host time
    draft_subsample: int = 8  # the same for drafts, which have fewer shapes
    draft_start_share: float = 0.2  # prior share of a one-token draft's time that does not depend on its length
    draft_node_share: float = 0.05  # prior share of a token in a draft or a prefill
    prefill_horizon: int = 64  # output tokens over which a drafter's prefill must pay for itself
    new_drafter_tokens: int = 4  # draft length, and trials, until a drafter counts as known
    # Choice.
    chain_cutoff: float = 0.8  # a longer draft is not considered once it is worth this share of the best shorter one
    min_probability_factor: float = 0.7  # a branch is drafted on if its probability exceeds this share of break-even
    max_prompt_rows: int = 64  # prompt rows of a step that are priced: with more of them drafts hardly matter
    hold_steps: int = 4  # steps for which a choice to draft stands while no free drafter has a draft
    plain_hold_steps: int = 16  # the same for a choice not to draft
    # Exploration, in steps.
    probe_tokens: int = 2  # draft tokens of a probe of an unused drafter
    probe_time_share: float = 0.01  # upper bound on probes, as a share of step time
    probe_interval: int = 16  # least interval of probes, doubled up to 32 times
    # Overhead of polling.
    poll_start_share: float = 0.03  # of a sequence's decode time, times acceptance: credit before polls have paid
    poll_max_credit: int = 64  # polls that a sequence can have in the bank: drafts are rare and save much
    poll_refill_share: float = 0.005  # of step time: what polls without credit may cost
    poll_refill_seconds: float = 5e-6  # and at most so much per step, a tenth of it more for each sequence
    poll_host_factor: float = 1.7  # host work that a poll causes later: packing, verifying, observing
    # Host gap and SLOs.
    gap_samples: int = 9  # samples per batch size, whose median is the host gap
    gap_interval: int = 256  # async steps until one runs synchronously to measure the gap again
    slo_lead: float = 1.1  # a sequence counts as late 10% before it is
    slo_weight: float = 2.0  # weight of all late sequences together, over that of the batch
    slo_optimism: float = 1.25  # an SLO is out of reach only if it is faster than the best plan by this factor
    slo_hold_seconds: float = 1.0  # for which an estimate of the best speed is used
