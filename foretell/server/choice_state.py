"""The state of one choice while it is generated: parsed output, tokens and draft statistics."""

from __future__ import annotations

import secrets
import string
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.server.parsers.base import OutputPart
from foretell.server.parsers.reasoning import ReasoningParser
from foretell.server.parsers.tools.base import ToolCallParser
from foretell.types import TARGET

if TYPE_CHECKING:
    from foretell.engine.sequence_state import SequenceState
    from foretell.engine.streams import StreamItem
    from foretell.types import FinishReason, Request, TokenLogprob

CALL_ID_LENGTH = 9  # characters; Mistral's templates require exactly this length, the others take any
# Reasons why a step had no draft, as they appear in responses and metrics.
USER, OFF, NO_DRAFT, FIRST, LAST = "user", "off", "no_guess", "first_token", "last_token"


@dataclass
class ParsedToolCall:
    """A tool call found in the output; `arguments` is JSON text."""

    name: str
    arguments: str = ""
    id: str = field(
        default_factory=lambda: "".join(secrets.choice(string.ascii_letters) for _ in range(CALL_ID_LENGTH))
    )

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedOutput:
    """Splits output text into reasoning, content and tool calls: reasoning first, the rest goes to the tool parser."""

    def __init__(
        self, reasoning_parser: ReasoningParser | None = None, tool_parser: ToolCallParser | None = None
    ) -> None:
        self.reasoning_parser, self.tool_parser = reasoning_parser, tool_parser
        self.is_plain = reasoning_parser is None and tool_parser is None  # all output is content

    def feed(self, text: str) -> list[OutputPart]:
        """Return the parts that are certain with this text."""
        if self.reasoning_parser is not None:
            return self._parse_tool_calls(self.reasoning_parser.feed(text))
        return self._parse_tool_calls([OutputPart("content", text)] if text else [])

    def finish(self) -> list[OutputPart]:
        """Return the parts that were held back until the end of the output."""
        parts = self._parse_tool_calls(self.reasoning_parser.finish() if self.reasoning_parser is not None else [])
        return parts + (self.tool_parser.finish() if self.tool_parser is not None else [])

    def _parse_tool_calls(self, parts: list[OutputPart]) -> list[OutputPart]:
        if self.tool_parser is None:
            return parts
        parsed: list[OutputPart] = []
        for part in parts:
            parsed += self.tool_parser.feed(part.text) if part.kind == "content" else [part]
        return parsed


@dataclass
class ChoiceState:
    """One choice of a response. `add` takes the engine's items in order."""

    request: Request
    index: int
    output: ParsedOutput = field(default_factory=ParsedOutput)
    single_tool_call: bool = False  # whether tool calls after the first are dropped
    text: str = ""  # raw output text
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each token: its drafter, or TARGET
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position; complete at the first token
    draft_steps: list[tuple[int, int]] = field(default_factory=list)  # (drafted, accepted) of each step with a draft
    drafted: int = 0  # sum over draft_steps
    accepted: int = 0  # sum over draft_steps
    skipped: Counter[str] = field(default_factory=Counter)  # steps without a draft, by reason
    finish: FinishReason | None = None  # the engine's reason; None while generating
    state: SequenceState | None = None  # the engine's own record; complete once the sequence has finished
    skips_call: bool = False  # whether a dropped tool call is being parsed
    _scanned: int = 0  # tokens scanned for the end of reasoning
    _num_reasoning: int | None = None  # tokens up to that end; None if not found yet

    def add(self, item: StreamItem) -> list[OutputPart]:
        """Add the output of one step and return its new parts, without dropped tool calls."""
        delta = item.delta
        self._count_draft(item)
        self.state, self.prompt_logprobs = item.state, item.state.prompt_logprobs
        self.text += delta.text
        self.tokens += delta.tokens
        self.origins += delta.origins
        self.logprobs += delta.logprobs or ()
        self.finish = delta.finish_reason
        if self.output.is_plain:  # fast path of most requests, taken for every token
            self.content += delta.text
            return [OutputPart("content", delta.text)] if delta.text else []
        parts = self.output.feed(delta.text)
        if delta.finish_reason is not None:
            parts += self.output.finish()
        return self.record(parts)

    def record(self, parts: list[OutputPart]) -> list[OutputPart]:
        """Add parsed parts to the message; return those that belong to the response."""
        return [part for part in parts if self._record(part)]

    def _count_draft(self, item: StreamItem) -> None:
        if item.delta.num_drafted:
            accepted = sum(origin != TARGET for origin in item.delta.origins)
            self.draft_steps.append((item.delta.num_drafted, accepted))
            self.drafted += item.delta.num_drafted
            self.accepted += accepted
        else:
            self.skipped[skip_reason(item)] += 1

    def _record(self, part: OutputPart) -> bool:
        if part.kind == "content":
            self.content += part.text
        elif part.kind == "reasoning":
            self.reasoning += part.text
        elif self.single_tool_call and self.tool_calls and (part.kind == "call" or self.skips_call):
            self.skips_call = True
            return False
        elif part.kind == "call":
            self.tool_calls.append(ParsedToolCall(part.text))
        else:
            self.tool_calls[-1].arguments += part.text
        return True

    def reasoning_tokens(self, end_tag: list[int]) -> int:
        """Return the number of tokens up to and including `end_tag`. Repeated calls scan each token once."""
        while self._num_reasoning is None and self._scanned + len(end_tag) <= len(self.tokens):
            if self.tokens[self._scanned : self._scanned + len(end_tag)] == end_tag:
                self._num_reasoning = self._scanned + len(end_tag)
            self._scanned += 1
        return len(self.tokens) if self._num_reasoning is None else self._num_reasoning

    @property
    def may_draft(self) -> bool:
        """Return whether any drafter is enabled for the request."""
        return bool(self.request.drafters)

    @property
    def openai_finish_reason(self) -> str:
        """Return the finish reason in OpenAI's terms."""
        if self.tool_calls and self.finish == "stop":
            return "tool_calls"
        return "length" if self.finish == "length" else "stop"


def skip_reason(item: StreamItem) -> str:
    """Return why a step had no draft for its sequence."""
    request = item.state.seq.request
    if not request.speculation.enabled or request.speculation.max_draft == 0:
        return USER
    if not request.drafters:
        return OFF
    if item.is_first:
        return FIRST  # the first token comes from prefill, which has no draft
    if item.delta.finish_reason == "length" and len(item.delta.tokens) == 1:
        return LAST
    return item.delta.skip_reason or NO_DRAFT
