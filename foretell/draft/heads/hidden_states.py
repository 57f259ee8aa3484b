"""Hidden states of the target that a draft head (EAGLE, Medusa, DFlash) has still to read.

A step of the target returns the hidden states of its rows. `accepted_hidden_states` selects those of tokens that stay;
they wait in `PendingHiddenStates` until `HeadDrafter.read_hidden_states` computes the head's own KV from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.models.draft_heads import HeadConfig
from foretell.runner.native.head_prefill import PrefillRange, addresses_of
from foretell.types import Sequence, StepResult

Rows = tuple[Tensor, int, int]  # hidden states of a step, first row, end


@dataclass
class PendingHiddenStates:
    """Hidden states of one sequence that the head has not read, for positions `start` to `stop`."""

    start: int
    rows: list[Rows] = field(default_factory=list)
    stop: int = 0
    has_gap: bool = False  # hidden states of earlier positions are missing because a step failed
    pages: list[int] = field(default_factory=list)  # the sequence's own list, a new one after each preemption

    def take(self, seq: Sequence, by_address: bool) -> PrefillRange:
        """Return the pending hidden states and mark them as read; `by_address`: rows need not be sliced."""
        slices = [] if by_address else [states[begin:end] for states, begin, end in self.rows]
        taken = AddressedRange(seq, self.start, self.stop, slices, self.rows)
        self.start, self.rows = self.stop, []
        return taken


@dataclass(frozen=True)
class AddressedRange(PrefillRange):
    """A range whose rows are passed to the native library by address: slicing them in torch takes as long as reading
    them natively."""

    step_rows: list[Rows]

    def row_addresses(self) -> list[int]:
        addresses: list[int] = []
        for states, begin, end in self.step_rows:
            addresses += addresses_of(states, begin, end)
        return addresses


class HiddenStateTracker(dict[int, PendingHiddenStates]):
    """The pending hidden states of all sequences, by id, and the pages with positions that the head could not read."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.unread_pages: set[int] = set()

    def continued(self, seq: Sequence, start: int) -> PendingHiddenStates:
        """Return the pending hidden states of a sequence whose next step begins at `start`.

        A sequence that is new, or was preempted and admitted again, has its first positions from the prefix cache: the
        head has read these for another sequence, unless that failed.
        """
        pending = self.get(seq.id)
        if pending is None or (pending.pages is not seq.pages and start != pending.stop) or start < pending.stop:
            pending = self[seq.id] = PendingHiddenStates(start, stop=start)
            shared = seq.pages[: self._pages_for(start)]
            pending.has_gap = bool(self.unread_pages) and not self.unread_pages.isdisjoint(shared)
        pending.pages = seq.pages
        return pending

    def mark_rewritten(self, seq: Sequence, start: int) -> None:
        """Note that a step has written all positions of the pages after `start`."""
        if self.unread_pages:
            self.unread_pages.difference_update(
                seq.pages[self._pages_for(start) : self._pages_for(seq.num_computed_tokens)]
            )

    def mark_unread(self, results: list[StepResult]) -> None:
        """Note that the head could not read the positions of a step; drafts without them would be noise."""
        for result in results:
            seq = result.scheduled.seq
            first_page = result.scheduled.start // self.page_size
            self.unread_pages.update(seq.pages[first_page : self._pages_for(seq.num_computed_tokens)])
            self[seq.id] = PendingHiddenStates(
                seq.num_computed_tokens, stop=seq.num_computed_tokens, has_gap=True, pages=seq.pages
            )
            if seq.finish_reason is not None:
                del self[seq.id]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def accepted_hidden_states(result: StepResult, first: int, count: int) -> list[Rows]:
    """Return the hidden states of a step's tokens that stay: pending tokens, then the accepted path.

    Tokens `first` to `count` of these are wanted, as runs of rows: gathering them would need an index on the device.
    """
    assert result.hidden_states is not None, "the target returns the hidden states that a head reads"
    num_pending = result.scheduled.num_new_tokens
    path = () if result.verify_result is None else result.verify_result.accepted_path
    stop = min(count, num_pending)
    start = min(first, stop)
    runs: list[tuple[int, int]] = []
    for node in path[max(0, first - num_pending) : max(0, count - num_pending)]:
        if num_pending + node != stop:
            runs.append((start, stop))
            start = num_pending + node
        stop = num_pending + node + 1
    return [(result.hidden_states, begin, end) for begin, end in (*runs, (start, stop)) if begin < end]


def layer_offsets(available: tuple[int, ...], config: HeadConfig) -> list[int]:
    """Return the column where each input of the head begins, in rows of the target's `available` hidden layers.

    The head's own layers come first, then what else it reads of a position, in parts of the target's width.
    """
    width = config.target_width
    others = config.input_width // width - len(config.hidden_layers)
    own = [available.index(layer) * width for layer in config.hidden_layers]
    return own + [(len(available) + i) * width for i in range(others)]


def layer_columns(
    available: tuple[int, ...], config: HeadConfig, device: torch.device, is_split: bool
) -> Tensor | None:
    """Return the columns of a row that the head reads, or None if it reads the whole row.

    Under tensor parallelism each rank computes what else the head reads of a position.
    """
    if available == config.hidden_layers:
        return None
    offsets = layer_offsets(available, config)
    some = offsets[: len(config.hidden_layers)] if is_split else offsets
    return torch.tensor([first + i for first in some for i in range(config.target_width)], device=device)
