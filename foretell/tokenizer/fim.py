"""Fill-in-the-middle tokens of a model, and the prompt they make of the text before and after a gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Names of the tokens by role, as the models that were trained for it write them: Qwen, StarCoder, Granite, DeepSeek,
# CodeLlama, CodeGemma, GLM, Codestral.
NAMES: dict[str, tuple[str, ...]] = {
    "prefix": (
        "<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "<|code_prefix|>", "▁<PRE>", "<PRE>",
        "[PREFIX]",
    ),
    "suffix": (
        "<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "<|code_suffix|>", "▁<SUF>", "<SUF>",
        "[SUFFIX]",
    ),
    "middle": (
        "<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<|code_middle|>", "▁<MID>", "<MID>",
    ),
    "pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    "repo": ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>", "<fim-repo>"),
    "separator": ("<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    "end": ("▁<EOT>", "<EOT>"),
}  # fmt: skip
REPO = "project"  # stands for the repository's name, which clients do not send
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, for models without a separator token


@dataclass(frozen=True)
class FimTokens:
    """The token ids of a model's fill-in-the-middle format; None for a token that it does not have."""

    prefix: int
    suffix: int
    middle: int | None = None
    pad: int | None = None
    repo: int | None = None
    separator: int | None = None
    end: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return all tokens of the format."""
        return tuple(token for token in vars(self).values() if token is not None)

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end the text of a gap: its own end (CodeLlama), or the model goes on to a file."""
        return tuple(token for token in (self.pad, self.repo, self.separator, self.end) if token is not None)

    def prompt(
        self, before: Sequence[int], after: Sequence[int], bos: Sequence[int] = (), context: Sequence[int] = ()
    ) -> list[int]:
        """Return the prompt of a gap; `context` are the tokens of other files."""
        if self.middle is None:  # Codestral: the text before the gap comes last, and the output follows it
            return [*bos, *context, self.suffix, *after, self.prefix, *before]
        return [*bos, *context, self.prefix, *before, self.suffix, *after, self.middle]

    def files(self, files: Sequence[tuple[str, str]], encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Return the tokens of each of the other files, given by name and text, the first with the repository's."""
        found = []
        for name, text in files:
            if self.separator is None:
                found.append(encode(SNIPPET + text))
            else:
                found.append([self.separator, *encode(f"{name}\n{text}")])
        if found and self.repo is not None:
            found[0] = [self.repo, *encode(REPO + "\n"), *found[0]]
        return found


def find_fim_tokens(token_id: Callable[[str], int | None], stated: Mapping[str, int]) -> FimTokens | None:
    """Return the tokens by their names in the vocabulary; those `stated` in the file by role come first.

    A model without tokens for the text before and after the gap has no fill-in-the-middle.
    """
    found = dict(stated)
    for role, names in NAMES.items():
        known = (token for token in map(token_id, names) if token is not None)
        if role not in found and (token := next(known, None)) is not None:
            found[role] = token
    return FimTokens(**found) if "prefix" in found and "suffix" in found else None
