"""What a state says so far: a plain text, or a chat."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.errors import RequestError


@dataclass(frozen=True)
class Message:
    """A turn that has ended."""

    role: str
    content: str

    def as_json(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Script:
    """Grows by making new ones, so that branches can share what lies before them. `text` is the open turn's, if any."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    role: str | None = None  # of the open turn

    @property
    def is_chat(self) -> bool:
        return self.role is not None or bool(self.messages)

    def append(self, text: str) -> Script:
        if self.messages and self.role is None:
            raise RequestError("s", "is a chat; put texts and generations into fp.user(...) or fp.assistant(...)")
        return replace(self, text=self.text + text)

    def begin(self, role: str) -> Script:
        if self.text:
            raise RequestError(role, "comes behind a text without a role; put that text into fp.system(...) too")
        return replace(self, role=role)

    def end(self) -> Script:
        assert self.role is not None, "turns come whole"
        return Script(messages=(*self.messages, Message(self.role, self.text)))

    def check_writable(self) -> None:
        """Refuse to generate where there is nothing to continue."""
        if not self.is_chat and not self.text:
            raise RequestError("s", "is empty; give it some text before a generation")
        if self.messages and self.role is None:
            raise RequestError("s", "is a chat; put generations into fp.assistant(...)")
        if self.role is not None and not self.messages:
            raise RequestError("s", "has no turn before the model's; begin with fp.user(...)")
