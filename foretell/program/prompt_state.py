"""The prompt of a branch so far: plain text, or a chat."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.errors import RequestError


@dataclass(frozen=True)
class ChatTurn:
    """A finished turn of a chat."""

    role: str
    content: str

    def as_json(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class PromptState:
    """An immutable prompt, so that branches share their prefix. `text` is plain text or that of the open turn."""

    text: str = ""
    messages: tuple[ChatTurn, ...] = ()
    role: str | None = None  # of the open turn

    @property
    def is_chat(self) -> bool:
        return self.role is not None or bool(self.messages)

    def append(self, text: str) -> PromptState:
        if self.messages and self.role is None:
            raise RequestError("s", "is a chat; put text and generations into fp.user(...) or fp.assistant(...)")
        return replace(self, text=self.text + text)

    def begin(self, role: str) -> PromptState:
        if self.text:
            raise RequestError(role, "follows text without a role; put that text into fp.system(...) too")
        return replace(self, role=role)

    def end(self) -> PromptState:
        assert self.role is not None, "a turn begins before it ends"
        return PromptState(messages=(*self.messages, ChatTurn(self.role, self.text)))

    def check_generable(self) -> None:
        """Refuse to generate if there is no prompt to continue."""
        if not self.is_chat and not self.text:
            raise RequestError("s", "is empty; append some text before a generation")
        if self.messages and self.role is None:
            raise RequestError("s", "is a chat; put generations into fp.assistant(...)")
        if self.role is not None and not self.messages:
            raise RequestError("s", "has no turn before the assistant's; begin with fp.user(...)")
