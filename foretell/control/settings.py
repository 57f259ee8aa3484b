"""Settings of the controller: options of the user and tuning constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from foretell.types import Sequence

MAX_TREE_ROWS = 256  # tree nodes of all sequences in one step; beyond that every row costs its full price everywhere


class DrafterLoader(Protocol):
    """Knows which drafters are unloaded because their memory was given back, and can load them again."""

    @property
    def unavailable(self) -> frozenset[str]: ...

    def request_load(self, name: str) -> None: ...


class AlwaysAvailable:
    """Loader of drafters that are never unloaded."""

    unavailable: frozenset[str] = frozenset()

    def request_load(self, name: str) -> None:
        """Do nothing."""


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


class CountDecay(NamedTuple):
    """Decay of old acceptance counts, and how strongly the level above is believed."""

    decay: float  # factor on the counts at each new one
    prior_weight: float  # draft tokens that the rate of the level above counts for


@dataclass(frozen=True)
class AcceptanceTuning:
    """Constants of the acceptance model. Counts are numbers of draft tokens."""

    confidence_trust: float = 0.7  # weight of a free drafter's own confidence in the prior of a confidence bin
    cross_trust: float = 0.2  # weight of free drafters' confidence in the prior of a timed drafter's bin
    default_prior: float = 0.5  # acceptance rate of a drafter that states none
    familiar: float = 64.0  # count from which on the optimism bonus is 0
    tree_doubt: float = 16.0  # count added to the trials in the optimism bonus of trees, which multiplies over levels
    new_request: float = 6.0  # count up to which a request gets the bonus of a new one
    enough_for_variance: float = 4.0  # count from which on a finished request updates the variance between requests
    initial_variance: float = 0.02  # variance of the first-token acceptance rate between requests
    variance_ema: float = 0.05  # smoothing of that variance, per request
    min_rescue: float = -0.5  # lower bound of the rescue rate of a tree level
    calibration_prior: float = 20.0  # expected and accepted tokens a calibration starts with
    calibration_decay: float = 0.995  # factor on both at each step
    request: CountDecay = CountDecay(0.97, 16.0)
    request_class: CountDecay = CountDecay(0.998, 12.0)
    drafter: CountDecay = CountDecay(0.999, 12.0)


@dataclass(frozen=True)
class LatencyTuning:
    """Constants of the latency models of target steps and drafts. Noise and deviations are relative to a step."""

    noise: float = 0.08  # least relative noise of a step that is assumed
    initial_noise: float = 0.15  # relative noise before any step was seen
    noise_rate: float = 0.05  # step of the running median of relative residuals
    outlier: float = 3.0  # residuals are clipped at this many medians
    drift: float = 0.002  # relative random walk of all costs per step
    pace: float = 0.5  # prior deviation of the overall pace
    bend: float = 0.1  # prior deviation of the rows curve around a line
    bend_scale: float = 3.0  # doublings of rows over which that deviation is correlated
    slope: float = 3.0  # prior deviation of the cost of a row, over its prior mean
    trend_ema: float = 0.1  # smoothing of the signed, clipped residual
    trend_limit: float = 0.5  # mean signed residual, in clips, at which the pace is taken to have changed
    initial_steps: int = 3  # steps whose median sets the initial pace, so that one outlier cannot
    loaded_steps: int = 32  # steps that saved costs count for
    loaded_pace: float = 0.2  # prior deviation of the pace of saved costs, since the machine may have changed
    warm_steps: int = 64  # updates before subsampling starts
    subsample: int = 32  # then update on 1 step in 32 of about the same number of rows
    update_seconds: float = 2e-4  # host time of one update, the new curve included
    update_time_share: float = 0.003  # share of step time for further updates on steps with drafts
    draft_subsample: int = 8  # after `warm_steps` drafts, update on 1 in 8
    draft_start_share: float = 0.2  # prior share of a one-token draft's time that does not depend on its length
    draft_node_share: float = 0.2  # prior share that grows with tokens, for drafters that make chains
    draft_node_share_trees: float = 0.05  # the same for drafters that make trees, which run a level at once
    draft_prefill_share: float = 0.05  # prior time of prefilling one token, over a one-token draft
    prefill_horizon: int = 64  # output tokens over which a drafter's prefill must pay for itself
    prefill_horizon_new: int = 16  # the same for a drafter with few trials
    min_probability_factor: float = 0.7  # a branch is drafted on if its probability exceeds this share of break-even
    max_min_probability: float = 0.9  # upper bound of that threshold


@dataclass(frozen=True)
class HostGapTuning:
    """Constants of the host gap estimate and of async scheduling."""

    window: int = 9  # samples per batch size, whose median is used
    known: int = 3  # samples after which that median is trusted
    resample_every: int = 16  # async steps until one runs synchronously to measure the gap
    resample_every_known: int = 256  # the same once the median is trusted
    savings_ema: float = 0.25  # smoothing of the seconds that drafts save per step


@dataclass(frozen=True)
class ExplorationTuning:
    """Constants of probes of unused drafters and of plain baseline steps. Intervals are in steps."""

    probe_tokens: int = 2  # draft tokens of a probe
    probe_time_share: float = 0.01  # upper bound on probes, as a share of step time
    probe_interval: int = 32  # least interval between two probes of a drafter
    probe_max_interval: int = 1024  # limit of the exponential backoff
    baseline_interval: int = 8  # speculative steps before the first baseline step
    baseline_interval_known: int = 64  # the same once step costs are known
    baseline_max_interval: int = 256  # limit of the exponential backoff
    baseline_known_steps: int = 32  # observed steps after which step costs count as known


@dataclass(frozen=True)
class PollTuning:
    """Constants of the poll limiter. Costs are in units of one poll unless they say seconds."""

    initial_polls: int = 16  # polls on credit of a new sequence
    initial_polls_after_losses: int = 3  # the same if recent polls did not pay or the sequence is short
    initial_time_share: float = 0.01  # upper bound on the initial polls, as a share of the sequence's decode time
    max_credit: int = 64  # polls that a sequence can have in the bank: drafts are rare and save much
    max_interval: int = 16  # steps between two polls of a sequence without credit
    refill_time_share: float = 0.005  # share of step time that refills the token bucket
    refill_step_seconds: float = 5e-6  # upper bound of one refill per step,
    refill_sequence_seconds: float = 5e-7  # and per sequence in it
    base_cost_tokens: int = 100  # a poll costs as much as catching up on this many tokens
    cost_ema: float = 0.1  # smoothing of the measured cost per token
    payoff_ema: float = 0.02  # smoothing of the mean payoff of a poll
    after_poll_factor: float = 1.7  # host work that a poll causes later: packing, verifying, observing
    batch_shrink: int = 2  # re-poll sequences when the batch has shrunk by this factor since their last poll


@dataclass(frozen=True)
class SloTuning:
    """Constants of the SLO tracker."""

    optimism: float = 1.25  # an SLO is out of reach only if it is faster than the best plan by this factor
    hold_seconds: float = 1.0  # for which the speed of a plan is assumed to hold
    lead: float = 1.05  # sequences are kept faster than their SLO by this factor
    known_tokens: int = 4  # output tokens after which a sequence's own speed replaces that of plain decoding


@dataclass(frozen=True)
class LengthTuning:
    """Constants of the length optimizer."""

    chain_cutoff: float = 0.97  # stop lengthening once the speedup is below this share of the best so far
    tree_cutoff: float = 0.9  # stop widening once the best of a width is below this share of the best so far
    slo_step_growth: float = 0.5  # share of a plain step by which drafts with priority may lengthen it
    new_drafter_tokens: int = 4  # trials below which a drafter counts as new, and its longest draft until then
    plan_reuse: int = 4  # polls of a sequence that share one plan, once its drafters are familiar
    max_prompt_rows: int = 64  # rows of a prompt in the cost of a step; the size of its next chunk is not known yet
    longer_every: int = 24  # one draft in 24 is one token longer than planned, to learn about greater depths
    poll_length_decay: float = 0.95  # per step, on the number of tokens asked of free drafters


@dataclass(frozen=True)
class DecisionTuning:
    """Constants of the switch between speculation on and off, as logged. It follows decisions and makes none."""

    ema: float = 0.06  # smoothing of the share of steps with drafts
    off_below: float = 0.05  # share of steps below which speculation is reported off
    on_above: float = 0.2  # and above which it is reported on again; the gap is hysteresis


@dataclass(frozen=True)
class ControllerTuning:
    """All constants of the adaptive controller, by component. They are not user options."""

    acceptance: AcceptanceTuning = AcceptanceTuning()
    latency: LatencyTuning = LatencyTuning()
    host_gap: HostGapTuning = HostGapTuning()
    exploration: ExplorationTuning = ExplorationTuning()
    poll: PollTuning = PollTuning()
    slo: SloTuning = SloTuning()
    length: LengthTuning = LengthTuning()
    decisions: DecisionTuning = DecisionTuning()
