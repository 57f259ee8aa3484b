"""Latency of drafts, learned as a price per draft, per level, per token and per token to prefill; and the host gap."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from foretell.types import DrafterTraits, Sequence, StepResult, StepTimes

from .latency_model import Fit
from .settings import ControllerTuning

# Key suffix of the costs of a drafter's trees, which may be drafted quite differently from its chains. Saved costs have
# it in their file format.
TREE_SUFFIX = ", trees"


class DraftPrices(NamedTuple):
    """Seconds of a draft, by what they depend on."""

    start: float = 0.0  # per draft
    level: float = 0.0  # per level of depth
    node: float = 0.0  # per draft token, over all sequences
    token: float = 0.0  # per token to prefill


class DraftCosts:
    """Learned prices of one drafter's chains or trees."""

    def __init__(
        self, cost_share: float, like: DraftCosts | None = None, tuning: ControllerTuning = ControllerTuning()
    ) -> None:
        """`cost_share` is the prior time of a one-token draft over a plain step. `like` has the prices to use until the
        first observation."""
        self.cost_share, self.tuning, self._like = cost_share, tuning, like
        self._fit: Fit | None = None
        self._prices: DraftPrices | None = None
        self._num_drafts = 0

    def prices(self, plain_seconds: float) -> DraftPrices:
        """Return the prices; before the first observation the prior, which is relative to a plain step."""
        if self._prices is not None:
            return self._prices
        if self._like is not None:
            return self._like.prices(plain_seconds)
        tuning, one_token = self.tuning, max(self.cost_share * plain_seconds, 1e-9)
        start, node = tuning.draft_start_share * one_token, tuning.draft_node_share * one_token
        return DraftPrices(start, one_token - start - node, node, node)

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
        self._prices = DraftPrices(*self._fit.mean.tolist())

    def dump(self) -> dict[str, Any]:
        """Return the prices as plain values."""
        return {} if self._fit is None else self._fit.dump()

    def load(self, saved: dict[str, Any]) -> None:
        """Replace the prices with those of an earlier start, unless these have another format."""
        found = Fit.load(saved, len(DraftPrices._fields), self.tuning)
        if found is not None:
            self._fit, self._prices = found, DraftPrices(*found.mean.tolist())


class DraftLatency:
    """Prices of all drafters."""

    def __init__(self, traits: Mapping[str, DrafterTraits], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.traits = traits
        self.free = frozenset(name for name, each in traits.items() if each.is_free)
        self.costs = {name: DraftCosts(each.relative_cost, tuning=tuning) for name, each in traits.items()}
        for name, each in traits.items():
            if each.makes_trees and not each.is_free:
                self.costs[name + TREE_SUFFIX] = DraftCosts(each.relative_cost, self.costs[name], tuning)

    def costs_of(self, drafter: str, tree: bool) -> DraftCosts:
        """Return the costs of a drafter's trees or of its chains."""
        return self.costs.get(drafter + TREE_SUFFIX, self.costs[drafter]) if tree else self.costs[drafter]

    def observe(self, results: list[StepResult], prefill: int, seconds: float, plain_seconds: float) -> None:
        """Update the costs with the drafts of one step, before which drafters prefilled so many tokens.

        Steps with several drafters, or with both trees and chains, are skipped: their times cannot be separated.
        """
        made = [each for each in results if len(each.draft) and each.scheduled.budget.drafter in self.costs]
        made = [each for each in made if each.scheduled.budget.drafter not in self.free]
        shapes = {(each.scheduled.budget.drafter, each.scheduled.budget.is_tree) for each in made}
        if len(shapes) == 1:
            ((drafter, tree),) = shapes
            depth = max([self._drafted_levels(each, drafter) for each in made])
            nodes = sum([len(each.draft) for each in made])
            self.costs_of(drafter, tree).observe(depth, nodes, prefill, seconds, plain_seconds)

    def _drafted_levels(self, result: StepResult, drafter: str) -> int:
        """Return the levels that were drafted, those that were cut off afterwards included."""
        scheduled, draft = result.scheduled, result.draft
        if self.is_single_graph(drafter, scheduled.seq):
            return scheduled.budget.depth
        return max(draft.depths()) if scheduled.budget.is_tree else len(draft)

    def is_single_graph(self, drafter: str, seq: Sequence) -> bool:
        """Return whether a drafter runs all levels of a draft at once, before the host sees any of them."""
        traits = self.traits[drafter]
        sampled = seq.request.params.temperature > 0 and seq.request.rule != "match"
        return traits.single_graph and (traits.samples_single_graph or not sampled)


class HostGap:
    """Seconds that the device idles between two steps while the host schedules, by batch size.

    Async scheduling removes the gap, but an async step is sent before its input tokens are known and can have no draft.
    So this class also tracks what drafts save, and decides which is worth more.
    """

    def __init__(self, tuning: ControllerTuning = ControllerTuning()) -> None:
        self.tuning = tuning
        # Both by the bit length of the batch size, since the host works on each sequence; and by whether the device
        # makes the drafts itself: it idles less then, because the host prepares the verification meanwhile.
        self._samples: dict[tuple[int, bool], deque[float]] = {}
        self._medians: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._host_seconds: dict[bool, float] = {}  # by whether a step drafts: host time that no other part has
        self._observed_at: tuple[float, int] = (0.0, 0)  # end of the last decode step, and its sequences
        self._savings = 0.0  # moving average of the seconds that drafts save per step
        self._async_steps = 0  # since the last synchronous one

    def observe(self, batch_size: int, seconds: float, device_drafts: bool = False) -> None:
        """Add the seconds between two steps of this batch size, in which the device waited for the host."""
        size = batch_size.bit_length()
        samples = self._samples.setdefault((size, device_drafts), deque(maxlen=self.tuning.gap_samples))
        samples.append(seconds)
        self._medians[device_drafts][size] = median_low(samples)

    def observe_step(self, count: int, has_drafts: bool, now: float, times: StepTimes | None) -> None:
        """Learn the host time between two steps, drafts, decisions and target aside; with drafts there is more to do.

        `times` is None unless all sequences were decoding. With async scheduling it overlaps with the device, and the
        host gap is measured instead.
        """
        before, sequences = self._observed_at
        self._observed_at = (0.0, 0) if times is None or times.host_gap is not None else (now, count)
        if times is None or times.is_outlier or sequences != count or self._observed_at[1] != count:
            return
        host = now - before - times.target_seconds - times.draft_seconds
        known = self._host_seconds.get(has_drafts, host)
        if 0 < host < times.target_seconds:  # else the engine was idle in between
            self._host_seconds[has_drafts] = known + 0.05 * (min(host, 3 * known) - known)

    @property
    def host_seconds(self) -> float:
        """Return the host time that drafts add to a step, without async scheduling."""
        return max(0.0, self._host_seconds.get(True, 0.0) - self._host_seconds.get(False, 0.0))

    def observe_savings(self, seconds: float) -> None:
        """Add the time that the drafts of one step are expected to save."""
        self._savings += 0.25 * (seconds - self._savings)

    def outweighs_drafts(self, batch_size: int) -> bool:
        """Return whether the next step should run asynchronously. Call it once per step.

        Some steps run synchronously to measure the gap again: more of them until three samples exist.
        """
        if self._savings >= self.seconds(batch_size):
            return False
        known = len(self._samples.get((batch_size.bit_length(), False), ())) >= 3
        interval = self.tuning.gap_interval if known else self.tuning.gap_interval // 16
        self._async_steps = (self._async_steps + 1) % interval
        return self._async_steps > 0

    def seconds(self, batch_size: int) -> float:
        """Return the median gap at this batch size or the nearest measured one; 0 before any measurement."""
        size, known = batch_size.bit_length(), self._medians[False] or self._medians[True]
        if size in known or not known:
            return known.get(size, 0.0)
        return known[min(known, key=lambda other: abs(other - size))]

    def hidden_seconds(self, batch_size: int) -> float:
        """Return the part of the gap that drafts made on the device hide; 0 until both cases were measured."""
        size = batch_size.bit_length()
        plain, drafting = self._medians[False].get(size), self._medians[True].get(size)
        return 0.0 if plain is None or drafting is None else plain - drafting
