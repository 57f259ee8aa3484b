"""The tokenizer of a model: encode, decode, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from foretell.errors import RequestError
from foretell.tokenizer.chat import ChatTemplates
from foretell.tokenizer.fim import find_fim_tokens
from foretell.tokenizer.gguf_vocab import TEMPLATE, read_gguf
from foretell.tokenizer.hf_files import read_files
from foretell.tokenizer.piece_decoding import PieceText, piece_decoding
from foretell.tokenizer.reasoning_tags import REASONING_TAGS, ReasoningTags, detect_reasoning
from foretell.tokenizer.spec import TokenizerSpec, library_error
from foretell.tokenizer.turn_rules import TurnRules

BATCH_ENCODE_CHARS = 4096  # longer input is encoded by `encode_batch_fast`, which releases the GIL
MAX_NORMALIZED = 4  # characters that a normalizer may merge into one; Unicode normalization stays below


class Tokenizer:
    """Encodes text to token ids and decodes them, exactly as the model's own tokenizer does."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._backend = spec.backend
        self._templates = ChatTemplates(spec.templates, spec.named)
        self.piece_decoding = piece_decoding(spec.backend)
        self.piece_texts = PieceTexts(self)
        self.vocab_size = spec.size
        bos = spec.named.get("bos_token")
        self.bos_id: int | None = spec.backend.token_to_id(bos) if bos else None
        self.end_ids = spec.end_ids
        added = spec.backend.get_added_tokens_decoder()
        self.fim = find_fim_tokens(spec.backend.token_to_id, spec.fim)
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def from_files(cls, files: Mapping[str, str], chat_template: str | None = None) -> Tokenizer:
        """Build from the contents of a model folder's files by name; tokenizer.json is required."""
        return cls(with_template(read_files(files), chat_template))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], chat_template: str | None = None) -> Tokenizer:
        """Build from the metadata of a GGUF file; the tokens that end a turn are those of the template in use."""
        given = {} if chat_template is None else {TEMPLATE: chat_template}
        return cls(with_template(read_gguf({**metadata, **given}), chat_template))

    @property
    def chat_template(self) -> str | None:
        """Return the source of the chat template, if the model has one."""
        return self._templates.default

    @property
    def tool_template(self) -> str | None:
        """Return the chat template for chats with tools; some models have a separate one."""
        return self._templates.with_tools

    def turn_rules(self, *, with_tools: bool) -> TurnRules:
        """Return which turns the chat template takes, in chats with tools or without."""
        return self._templates.turn_rules(with_tools=with_tools)

    @property
    def reasoning_tags(self) -> ReasoningTags:
        """Return the tags of the model's reasoning; those of most models if its chat template has none."""
        return REASONING_TAGS[detect_reasoning(self.chat_template) or "think"]

    def check_templates(self) -> None:
        """Refuse chat templates that exceed the limits of their sandbox."""
        self._templates.check()

    @cached_property
    def longest_token(self) -> int:
        """Return the maximum number of characters that one token can encode."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        return longest if self._backend.normalizer is None else longest * MAX_NORMALIZED

    def as_json(self) -> str:
        """Return the tokenizer.json, which excludes the chat templates."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encode text. Special tokens in it are recognized, and BOS is added if the model does so."""
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise RequestError(
                "prompt", f"has half a surrogate pair at character {problem.start}; send valid Unicode"
            ) from None
        try:
            if len(text) <= BATCH_ENCODE_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special).ids
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        except BaseException as problem:
            raise failed("prompt", "encode", problem) from problem
        return found.ids

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which the names of special and fill-in-the-middle tokens are text like any other.

        A source file may explain them; as tokens they would change what the prompt means. No BOS is added.
        """
        tokens = self.encode(text, add_special=False)
        if self._controls.isdisjoint(tokens):
            return tokens
        try:
            made = self._controls - {self._unknown_id}  # by merges, and not of unknown letters
            found = self._without_added_tokens(text)
            return [each for token in found for each in (self._letters(token) if token in made else (token,))]
        except BaseException as problem:
            raise failed("prompt", "encode", problem) from problem

    def _without_added_tokens(self, text: str) -> list[int]:
        """Encode text by the normalizer, the pre-tokenizer and the merges alone."""
        normalizer = self._backend.normalizer
        return self._merged(text if normalizer is None else normalizer.normalize_str(text))

    def _merged(self, text: str) -> list[int]:
        split, model = self._backend.pre_tokenizer, self._backend.model
        pieces = [text] if split is None else [piece for piece, _ in split.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in model.tokenize(piece)]

    def _letters(self, token: int) -> list[int]:
        """Return a control token, which the merges can make of its name, as the tokens of its letters."""
        return [each for char in self.piece(token) or "" for each in self._merged(char)]

    @cached_property
    def _controls(self) -> frozenset[int]:
        """Tokens that structure a prompt and have no meaning inside a text."""
        return self.special_ids.union(() if self.fim is None else self.fim.tokens)

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = getattr(self._backend.model, "unk_token", None)
        return None if unknown is None else self._backend.token_to_id(unknown)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode tokens; ids outside the vocabulary are skipped."""
        try:
            return self._backend.decode(list(tokens), skip_special_tokens=skip_special)
        except BaseException as problem:
            raise failed("tokens", "decode", problem) from problem

    def piece(self, token: int) -> str | None:
        """Return the vocabulary entry of a token; None for an unknown id."""
        return self._backend.id_to_token(token)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; for a special token those of its name."""
        piece = self.piece(token) if token in self.special_ids else self.piece_texts[token]
        return piece if isinstance(piece, bytes) else (piece or "").encode()

    def token_text(self, token: int) -> str:
        """Return a token as printable text; incomplete characters become U+FFFD."""
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
        """Apply the chat template and encode. The template adds BOS itself."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special=False)


def with_template(spec: TokenizerSpec, chat_template: str | None) -> TokenizerSpec:
    """Replace the model's chat templates by one."""
    return spec if chat_template is None else replace(spec, templates={"default": chat_template})


def failed(field: str, action: str, problem: BaseException) -> RequestError:
    """Return the error for input that the library rejects, or panics on."""
    reason = " ".join(str(library_error(problem)).split())[:300]
    return RequestError(field, f"the model's tokenizer cannot {action} this: {reason}")


class PieceTexts(dict[int, PieceText]):
    """The decoded piece of each token, computed on first use: most of a large vocabulary never occurs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> PieceText:
        piece = self._tokenizer.piece(token)
        try:
            self[token] = None if piece is None else self._tokenizer.piece_decoding.read(piece)
        except BaseException as problem:
            raise failed("tokens", "decode", problem) from problem
        return self[token]
