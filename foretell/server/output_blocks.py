"""Output as a list of blocks: reasoning, text or one tool call each, for the APIs that stream block by block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import from_json

from foretell.server.parsers.base import OutputPart
from foretell.server.response_builder import ResponseBuilder, ResponseContext
from foretell.server.sse import typed_event

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.openai.requests import GenerationRequest
    from foretell.server.preprocess import GenerationJob

Event = dict[str, Any]
BlockKind = Literal["content", "reasoning", "call"]


@dataclass
class OutputBlock:
    """A block of the output. `text` of a call is its arguments as JSON text."""

    kind: BlockKind
    index: int
    name: str = ""  # of the called function
    call_id: str = ""
    text: str = ""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call; those complete so far if the token limit cut them off."""
        try:
            value = from_json(self.text, allow_partial=True)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class BlockResponseBuilder(ResponseBuilder):
    """Builds responses with one choice whose output is a list of blocks, in events or complete."""

    def __init__(
        self, context: ResponseContext, job: GenerationJob, body: GenerationRequest, request_id: str, model: str
    ) -> None:
        super().__init__(context, job, body, request_id, model)
        (self.choice,) = self.choices
        self.blocks: list[OutputBlock] = []
        self._num_calls = 0
        self._is_open = False  # whether the events of `opening` were sent

    def encode(self, event: Event) -> bytes:
        """Encode an event of the stream."""
        return typed_event(event)

    @abstractmethod
    def opening(self) -> Iterable[Event]:
        """Return the events before the first block."""

    @abstractmethod
    def block_start(self, block: OutputBlock) -> Iterable[Event]:
        """Return the events at the start of a block; its text follows in deltas."""

    @abstractmethod
    def block_delta(self, block: OutputBlock, text: str) -> Iterable[Event]:
        """Return the events for more text of a block."""

    @abstractmethod
    def block_stop(self, block: OutputBlock) -> Iterable[Event]:
        """Return the events at the end of a block."""

    @abstractmethod
    def closing(self) -> Iterable[Event]:
        """Return the events after the last block."""

    def add(self, item: StreamItem) -> None:
        for part in self.choice.add(item):
            self._add_part(part)

    def events(self, item: StreamItem) -> bytes:
        return b"".join([self.encode(event) for event in self._item_events(item)])

    def _item_events(self, item: StreamItem) -> Iterator[Event]:
        parts = self.choice.add(item)
        yield from self._opening_once()
        for part in parts:
            last = self.blocks[-1] if self.blocks else None
            block = self._add_part(part)
            if block is not last:
                if last is not None:
                    yield from self.block_stop(last)
                yield from self.block_start(block)
            if part.kind != "call":
                yield from self.block_delta(block, part.text)
        if self.choice.finish is not None:
            if self.blocks:
                yield from self.block_stop(self.blocks[-1])
            yield from self.closing()

    def early_events(self) -> bytes:
        return b"".join([self.encode(event) for event in self._opening_once()])

    def _opening_once(self) -> Iterator[Event]:
        if not self._is_open:
            self._is_open = True
            yield from self.opening()

    def _add_part(self, part: OutputPart) -> OutputBlock:
        """Append a part to the last block, or start a new one; return the block."""
        if part.kind == "call":
            call = self.choice.tool_calls[self._num_calls]
            self._num_calls += 1
            self.blocks.append(OutputBlock("call", len(self.blocks), part.text, call.id))
        elif part.kind == "arguments":
            self.blocks[-1].text += part.text
        else:
            if not self.blocks or self.blocks[-1].kind != part.kind:
                self.blocks.append(OutputBlock(part.kind, len(self.blocks)))
            self.blocks[-1].text += part.text
        return self.blocks[-1]

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string at which the output ended."""
        state = self.choice.state
        return None if state is None or self.choice.finish != "stop" else state.detokenizer.matched_stop
