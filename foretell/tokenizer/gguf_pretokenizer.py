"""How byte-level tokenizers cut text into words before merging, by the names GGUF files give to it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from foretell.errors import UnsupportedModelError
from foretell.options import nearest

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Pre:
    """How one family of tokenizers prepares text."""

    splits: tuple[str, ...] = ()  # one after the other; none: GPT-2's own
    digits: bool = False  # each digit is a word
    nfc: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is taken whole, whatever the merges say
    bos: bool = False  # BOS goes first unless the file says otherwise

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to the text first."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """What cuts the text into words, spelled in the letters for bytes."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return pre_tokenizers.Sequence(steps)


LLAMA3_FAMILY = Pre((LLAMA3,), whole_words=True, bos=True)
QWEN2_FAMILY = Pre((QWEN2,), nfc=True)
KNOWN = {
    **dict.fromkeys(("gpt-2", "default", "phi-2"), Pre()),
    **dict.fromkeys(("olmo", "mpt"), Pre(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), Pre(digits=True)),
    "command-r": Pre(digits=True, nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3_FAMILY),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_FAMILY),
    "qwen35": Pre((QWEN35,), nfc=True),
    "tekken": Pre((TEKKEN,), whole_words=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Pre((GPT4O,))),
    "deepseek-v3": Pre(DEEPSEEK3),
}


def pre_of(name: str) -> Pre:
    """The preparation a GGUF file asks for by name."""
    if name not in KNOWN:
        message = f"this GGUF file splits text as {name!r}, which is not known here; {nearest(name, KNOWN)}"
        raise UnsupportedModelError(message)
    return KNOWN[name]
