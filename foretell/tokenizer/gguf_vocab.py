"""Tokenizers from GGUF metadata, which has the vocabulary but only the name of the pre-tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from foretell.errors import ModelError, UnsupportedModelError
from foretell.options import nearest
from foretell.tokenizer.spec import TokenizerSpec

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
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenization:
    """Normalization and pre-tokenization of one tokenizer family."""

    splits: tuple[str, ...] = ()  # regexes in order; empty means GPT-2's own
    digits: bool = False  # split digits
    nfc: bool = False
    whole_words: bool = False  # a word in the vocabulary is one token regardless of merges (ignore_merges)
    bos: bool = False  # adds BOS unless the file says otherwise

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the normalizer, if any."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer, which ends with the byte-level mapping."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return pre_tokenizers.Sequence(steps)


LLAMA3_FAMILY = PreTokenization((LLAMA3,), whole_words=True, bos=True)
QWEN2_FAMILY = PreTokenization((QWEN2,), nfc=True)
KNOWN = {
    **dict.fromkeys(("gpt-2", "default", "phi-2", "exaone4", "granite-docling"), PreTokenization()),
    **dict.fromkeys(("olmo", "mpt"), PreTokenization(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), PreTokenization(digits=True)),
    "command-r": PreTokenization(digits=True, nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3_FAMILY),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenization((LLAMA3,))),  # OLMo 2, Phi-4, SmolLM3
    "seed-coder": PreTokenization((SEED,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_FAMILY),
    "qwen35": PreTokenization((QWEN35,), nfc=True),
    "tekken": PreTokenization((TEKKEN,), whole_words=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenization((GPT4O,))),
    "deepseek-v3": PreTokenization(DEEPSEEK3),
}


def pre_tokenization(name: str) -> PreTokenization:
    """Return the pre-tokenization of a GGUF name."""
    if name not in KNOWN:
        message = f"this GGUF file has the pre-tokenizer {name!r}, which is unknown; {nearest(name, KNOWN)}"
        raise UnsupportedModelError(message)
    return KNOWN[name]


KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
FIM_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repo": ("fim_rep",),
    "separator": ("fim_sep",),
}
# A GGUF file has no generation config; these tokens end a turn if the chat template uses them.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>")
SPACE = "\u2581"


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerSpec:
    """Build a tokenizer from metadata; the kinds are those of llama.cpp."""
    kind = str(metadata.get(KEY + "model"))
    builders = {"gpt2": byte_level, "llama": sentence_piece, "gemma4": sentence_piece}
    if kind not in builders:
        raise UnsupportedModelError(
            f"this GGUF file has a tokenizer of kind {kind!r}; supported are {', '.join(builders)}"
        )
    tokens = [str(text) for text in require(metadata, "tokens")]
    types = [int(number) for number in metadata.get(KEY + "token_type", [NORMAL] * len(tokens))]
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ModelError("the GGUF vocabulary has a token twice, or tokens without a type; convert the model again")
    ids = named_ids(metadata, len(tokens))
    backend, bos_is_usual = builders[kind](metadata, tokens, types)
    mark_added(backend, tokens, types, set(ids.values()))
    bos = ids.get("bos") if metadata.get(KEY + "add_bos_token", bos_is_usual) else None
    eos = ids.get("eos") if metadata.get(KEY + "add_eos_token", False) else None
    add_ends(backend, None if bos is None else tokens[bos], None if eos is None else tokens[eos])
    named = {f"{name}_token": tokens[token] for name, token in ids.items()}
    templates = read_templates(metadata)
    ends = ends_of(ids, tokens, types, templates)
    return TokenizerSpec(backend, len(tokens), named, ends, templates, fim_ids(metadata, len(tokens)))


def require(metadata: Mapping[str, Any], name: str, count: int | None = None) -> Sequence[Any]:
    """Return a required list, of length `count` if given."""
    value = metadata.get(KEY + name)
    if value is None or count not in (None, len(value)):
        raise ModelError(f"the GGUF file lacks {KEY}{name} or part of it; convert the model again")
    return list(value)


def named_ids(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    """Return the tokens with a role, by role. Converters write ids outside the vocabulary for unused roles."""
    ids = {name: metadata.get(f"{KEY}{word}_token_id") for name, word in NAMES.items()}
    return {name: int(token) for name, token in ids.items() if token is not None and 0 <= token < size}


def fim_ids(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    """Return the fill-in-the-middle tokens that the file names, by role; older converters have other keys."""
    found: dict[str, int] = {}
    for role, keys in FIM_KEYS.items():
        ids = (metadata.get(f"{KEY}{key}_token_id") for key in keys)
        token = next((token for token in ids if token is not None and 0 <= token < size), None)
        if token is not None:
            found[role] = int(token)
    return found


def byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether it adds BOS by default."""
    pre = pre_tokenization(str(metadata.get(KEY + "pre", "default")))
    vocab = {text: i for i, text in enumerate(tokens) if types[i] != UNUSED}
    merges = [read_merge(line, vocab) for line in require(metadata, "merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    normalizer = pre.normalizer()
    if normalizer:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.bos


def read_merge(line: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    """Return the two halves of a merge."""
    left, _, right = line.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise ModelError(f"the GGUF file merges {line!r}, which makes no token; convert the model again")
    return left, right


def sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a SentencePiece BPE tokenizer with byte fallback, and that it adds BOS by default.

    Gemma 4's files state the merges; the scores of others imply them.
    """
    states_merges = metadata.get(KEY + "model") == "gemma4"
    spelled = with_marks(tokens)
    vocab = {text: i for i, text in enumerate(spelled) if types[i] != UNUSED}
    if states_merges:
        merges = [read_merge(line, vocab) for line in require(metadata, "merges")]
    else:
        merges = list(merges_from_scores(spelled, types, require(metadata, "scores", len(tokens)), vocab))
    ids = named_ids(metadata, len(tokens))
    unknown = spelled[ids["unk"]] if "unk" in ids else None
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(KEY + "add_space_prefix", not states_merges):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def with_marks(tokens: list[str]) -> list[str]:
    """Replace spaces in Gemma's whitespace tokens, which GGUF files store unmarked."""
    taken = set(tokens)
    marked = [text.replace(" ", SPACE) if text.isspace() else text for text in tokens]
    return [text if new in taken else new for text, new in zip(tokens, marked, strict=True)]


def merges_from_scores(
    tokens: list[str], types: list[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens that merges into a token, best token first.

    SentencePiece takes user-defined tokens before any merge, so they rank first; their scores mean nothing.
    """
    made = [i for i, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    made.sort(key=lambda i: (types[i] != USER_DEFINED, -scores[i]))
    for i in made:
        text = tokens[i]
        for cut in range(len(text) - 1, 0, -1):
            if (left := text[:cut]) in vocab and (right := text[cut:]) in vocab:
                yield left, right


def mark_added(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], named: set[int]) -> None:
    """Register control and user-defined tokens, which match their text verbatim."""
    special = [text for i, text in enumerate(tokens) if types[i] == CONTROL or i in named]
    plain = [text for i, text in enumerate(tokens) if types[i] == USER_DEFINED and i not in named]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    in_vocab = [text for text in plain if backend.token_to_id(text) is not None]
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in in_vocab])


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` add `bos` before and `eos` after encoded text, if given."""
    ends = {role: text for role, text in (("bos", bos), ("eos", eos)) if text is not None}
    # Under our own names: a colon in a token's text has a meaning in the template.
    special = [{"id": role, "ids": [backend.token_to_id(text)], "tokens": [text]} for role, text in ends.items()]
    single = [piece for piece in ("bos", "$A", "eos") if piece in ends or piece == "$A"]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def read_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name."""
    named = {
        key.removeprefix(TEMPLATE + "."): str(text) for key, text in metadata.items() if key.startswith(TEMPLATE + ".")
    }
    return named | ({"default": str(metadata[TEMPLATE])} if TEMPLATE in metadata else {})


def ends_of(
    ids: Mapping[str, int], tokens: list[str], types: list[int], templates: Mapping[str, str]
) -> frozenset[int]:
    """Return the end tokens: those the file names, and those that end turns in its chat template."""
    written = [text for text in TURN_ENDS if text in templates.get("default", "")]
    turn_ends = [tokens.index(text) for text in written if text in tokens]
    controls = [token for token in turn_ends if types[token] == CONTROL]
    return frozenset([ids[name] for name in ("eos", "eot", "eom") if name in ids] + controls)
