"""Tokenizers, chat templates and incremental detokenization, for Hugging Face folders and GGUF files."""

from foretell.tokenizer.stream import StreamDecoder
from foretell.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
