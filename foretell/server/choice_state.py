"""One text of a request, as it is written."""

from __future__ import annotations

import secrets
import string
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.server.parsers.base import OutputPart
from foretell.server.parsers.reasoning import ReasoningParser
from foretell.server.parsers.tools.reader import ToolCallParser
from foretell.types import TARGET

if TYPE_CHECKING:
    from foretell.engine.sequence_state import SequenceState
    from foretell.engine.streams import StreamItem
    from foretell.types import FinishReason, Request, TokenLogprob

ID_LENGTH = 9  # Mistral's templates take ids of just this length, and the others any
USER, OFF, NOTHING, FIRST, LAST = "user", "off", "no_guess", "first_token", "last_token"  # reasons not to draft


@dataclass
class ParsedToolCall:
    """A call of a tool."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: "".join(secrets.choice(string.ascii_letters) for _ in range(ID_LENGTH)))

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedOutput:
    """An answer taken apart: thoughts first, then words and calls."""

    def __init__(self, thoughts: ReasoningParser | None = None, tools: ToolCallParser | None = None) -> None:
        self.thoughts, self.tools = thoughts, tools
        self.plain = thoughts is None and tools is None  # whether all of it is words

    def feed(self, text: str) -> list[OutputPart]:
        said = [OutputPart("content", text)] if self.thoughts is None and text else []
        if self.thoughts is not None:
            said = self.thoughts.feed(text)
        return self._read_tools(said)

    def finish(self) -> list[OutputPart]:
        """What is left at the end."""
        said = self._read_tools(self.thoughts.finish() if self.thoughts is not None else [])
        return said + (self.tools.finish() if self.tools is not None else [])

    def _read_tools(self, said: list[OutputPart]) -> list[OutputPart]:
        if self.tools is None:
            return said
        return [part for each in said for part in (self.tools.feed(each.text) if each.kind == "content" else [each])]


@dataclass
class ChoiceState:
    """What is known of one text; `add` takes the pieces in turn."""

    request: Request
    index: int
    reading: ParsedOutput = field(default_factory=ParsedOutput)
    one_call: bool = False  # whether further calls are left out
    text: str = ""  # as the model wrote it
    content: str = ""
    reasoning: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by place; whole from the first token on
    steps: list[tuple[int, int]] = field(default_factory=list)  # of each step with a draft: guesses, those accepted
    drafted: int = 0  # the sums of these
    accepted: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # steps without a draft, by reason
    finish: FinishReason | None = None
    track: SequenceState | None = None  # the engine's own record; whole once the text has ended
    muted: bool = False  # whether a call is being left out
    _looked: int = 0  # tokens that were looked at for the end of thoughts
    _thoughts: int | None = None  # tokens up to that end

    def add(self, piece: StreamItem) -> list[OutputPart]:
        """Take one piece in; what it says comes back, calls that are left out excepted."""
        delta = piece.delta
        self._count(piece)
        self.track, self.prompt_logprobs = piece.state, piece.state.prompt_logprobs
        self.text += delta.text
        self.tokens += delta.tokens
        self.origins += delta.origins
        self.logprobs += delta.logprobs or ()
        self.finish = delta.finish_reason
        if self.reading.plain:  # most are, and every token comes by here
            self.content += delta.text
            return [OutputPart("content", delta.text)] if delta.text else []
        said = self.reading.feed(delta.text)
        if delta.finish_reason is not None:
            said += self.reading.finish()
        return self.hear(said)

    def hear(self, said: list[OutputPart]) -> list[OutputPart]:
        """Take in what was said; what a caller is not to hear of is left out."""
        return [part for part in said if self._hear(part)]

    def _count(self, piece: StreamItem) -> None:
        if piece.delta.num_drafted:
            accepted = sum(origin != TARGET for origin in piece.delta.origins)
            self.steps.append((piece.delta.num_drafted, accepted))
            self.drafted += piece.delta.num_drafted
            self.accepted += accepted
        else:
            self.skipped[skip_reason(piece)] += 1

    def _hear(self, part: OutputPart) -> bool:
        if part.kind == "content":
            self.content += part.text
        elif part.kind == "reasoning":
            self.reasoning += part.text
        elif self.one_call and self.calls and (part.kind == "call" or self.muted):
            self.muted = True
            return False
        elif part.kind == "call":
            self.calls.append(ParsedToolCall(part.text))
        else:
            self.calls[-1].arguments += part.text
        return True

    def thought_tokens(self, closes: list[int]) -> int:
        """Tokens of thoughts, up to the mark `closes`; each token is looked at once however often one asks."""
        while self._thoughts is None and self._looked + len(closes) <= len(self.tokens):
            if self.tokens[self._looked : self._looked + len(closes)] == closes:
                self._thoughts = self._looked + len(closes)
            self._looked += 1
        return len(self.tokens) if self._thoughts is None else self._thoughts

    @property
    def speculates(self) -> bool:
        """Whether somebody may guess for it."""
        return bool(self.request.drafters)

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words."""
        if self.calls and self.finish == "stop":
            return "tool_calls"
        return "length" if self.finish == "length" else "stop"


def skip_reason(piece: StreamItem) -> str:
    """Why a step had no draft for a text."""
    request = piece.state.seq.request
    if not request.speculation.enabled or request.speculation.max_draft == 0:
        return USER
    if not request.drafters:
        return OFF
    if piece.is_first:
        return FIRST  # it waits for nobody's guess
    if piece.delta.finish_reason == "length" and len(piece.delta.tokens) == 1:
        return LAST
    return piece.delta.skip_reason or NOTHING
