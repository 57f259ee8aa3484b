"""Texts run by a runner in any pieces, alone or together, with their logits at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.runner.executor import EagerExecutor
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

CONTEXT = 128
Part = tuple[Sequence, int, Draft]  # how many of a text's tokens to run, and what hangs on the last of them


def random_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """Every weight and bias counts, and tokens are told apart well beyond rounding."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.5, 0.3)
    return model


def text(length: int, vocab: int, seed: int = 1) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class RunnerHarness:
    """One runner and the texts in its pages."""

    def __init__(self, model: Decoder, page_size: int = 4, taps: tuple[int, ...] = ()) -> None:
        self.runner = ModelRunner(model, 6 * CONTEXT // page_size, page_size, CONTEXT, taps)

    def eager(self) -> RunnerHarness:
        """The same pages by the definition."""
        self.runner.executor = EagerExecutor(self.runner.model, self.runner.cache, self.runner.layout)
        return self

    def open(self, tokens: list[int]) -> Sequence:
        """A text with pages of its own, of which nothing ran yet."""
        # All of it is a prompt whose logprobs are wanted: then every row's logits come.
        request = Request("x", tuple(tokens), SamplingParams(prompt_logprobs=0), 0, 0)
        seq = Sequence(0, request, list(tokens))
        assert self.runner.reserve(seq, CONTEXT), "pages for every text"
        return seq

    def close(self, seq: Sequence) -> None:
        self.runner.trim(seq, 0)

    def run(self, *parts: Part) -> list[Tensor]:
        """Logits of each part's rows, in one step."""
        shares = [ScheduledSequence.of(seq, take) for seq, take, _ in parts]
        output = self.runner.forward(shares, [draft for _, _, draft in parts])
        for seq, take, _ in parts:
            seq.cached += take
        return list(torch.split(output.logits, [take + len(draft) for _, take, draft in parts]))

    def read(self, tokens: list[int], piece: int | None = None) -> Tensor:
        """Logits after each token of a text that is alone, read in pieces."""
        seq = self.open(tokens)
        sizes = [min(piece or len(tokens), len(tokens) - at) for at in range(0, len(tokens), piece or len(tokens))]
        rows = torch.cat([self.run((seq, size, Draft()))[0] for size in sizes])
        self.close(seq)
        return rows
