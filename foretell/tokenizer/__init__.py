"""Text to tokens and back, for models in Hugging Face folders and in GGUF files."""

from foretell.tokenizer.stream import StreamDecoder
from foretell.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
