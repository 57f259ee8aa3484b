"""One tokenizer for every model: encode, decode, chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from foretell.errors import RequestError
from foretell.tokenizer.chat import ChatTemplates
from foretell.tokenizer.gguf_vocab import read_gguf
from foretell.tokenizer.hf_files import read_files
from foretell.tokenizer.piece_decoding import Reading, spelling_of
from foretell.tokenizer.spec import Parts, unless_foreign

LONG = 4096  # characters; `encode` of a longer text would keep all other threads waiting
MERGED = 4  # characters that a normalizer may make one of; Unicode's own forms stay below


class Tokenizer:
    """Turns text into token ids and back, exactly as the model's own tokenizer does."""

    def __init__(self, parts: Parts) -> None:
        self._backend = parts.backend
        self._templates = ChatTemplates(parts.templates, parts.named)
        self.spelling = spelling_of(parts.backend)
        self.readings = Readings(self)
        self.vocab_size = parts.size
        bos = parts.named.get("bos_token")
        self.bos_id: int | None = parts.backend.token_to_id(bos) if bos else None
        self.end_ids = parts.end_ids
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Tokenizer:
        """From the texts of a model folder's files, by file name; tokenizer.json must be among them."""
        return cls(read_files(files))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file."""
        return cls(read_gguf(metadata))

    @property
    def chat_template(self) -> str | None:
        """The source of the template chats are written with, if the model has one."""
        return self._templates.default

    @property
    def tool_template(self) -> str | None:
        """The same for chats with tools: some models have one of its own."""
        return self._templates.with_tools

    def check_templates(self) -> None:
        """Refuse chat templates that exceed the limits of their sandbox."""
        self._templates.check()

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a text that one token can stand for."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        return longest if self._backend.normalizer is None else longest * MERGED

    def as_json(self) -> str:
        """All of it but the chat templates, as a tokenizer.json."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of `text`, with special tokens known by their names, and with BOS if the model has it so."""
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise RequestError(
                "prompt", f"has half a surrogate pair at character {problem.start}; send valid Unicode"
            ) from None
        try:
            if len(text) <= LONG:
                return self._backend.encode(text, add_special_tokens=add_special).ids
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)  # releases the GIL
        except BaseException as problem:
            raise failed("prompt", "encode", problem) from problem
        return found.ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `tokens`; ids outside the vocabulary have none."""
        try:
            return self._backend.decode(list(tokens), skip_special_tokens=skip_special)
        except BaseException as problem:
            raise failed("tokens", "decode", problem) from problem

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that means nothing."""
        return self._backend.id_to_token(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; a special token's are those of its name."""
        reading = self.piece(token) if token in self.special_ids else self.readings[token]
        return reading if isinstance(reading, bytes) else (reading or "").encode()

    def token_text(self, token: int) -> str:
        """A token for showing to people: what is not a whole character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # a template may have variables of any name
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The chat as the text the model was trained on; `kwargs` are variables for the template."""
        return self._templates.render(messages, tools, {"add_generation_prompt": add_generation_prompt, **kwargs})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """The chat as token ids. The template writes BOS itself, so none is added."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special=False)


def failed(field: str, action: str, problem: BaseException) -> RequestError:
    """Return the error for a text or tokens that the library refuses, or panics at."""
    reason = " ".join(str(unless_foreign(problem)).split())[:300]
    return RequestError(field, f"the model's tokenizer cannot {action} this: {reason}")


class Readings(dict[int, Reading]):
    """What each token says, found when first asked for: a vocabulary is large and most of it never comes up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> Reading:
        piece = self._tokenizer.piece(token)
        try:
            self[token] = None if piece is None else self._tokenizer.spelling.read(piece)
        except BaseException as problem:
            raise failed("tokens", "decode", problem) from problem
        return self[token]
