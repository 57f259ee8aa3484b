"""A harness that runs sequences in any chunks, alone or in a batch, and returns their logits."""

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
Part = tuple[Sequence, int, Draft]  # a sequence, how many of its tokens to run, and the draft after them


def random_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """Return a model whose logits differ by much more than rounding and depend on every weight and bias."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.5, 0.3)
    return model


def text(length: int, vocab: int, seed: int = 1) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class RunnerHarness:
    """A runner and sequences in its pages."""

    def __init__(
        self,
        model: Decoder,
        page_size: int = 4,
        taps: tuple[int, ...] = (),
        context: int = CONTEXT,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.context = context
        self.runner = ModelRunner(model, 6 * context // page_size, page_size, context, taps, kv_dtype=kv_dtype)

    def eager(self) -> RunnerHarness:
        """Switch to the reference executor."""
        self.runner.executor = EagerExecutor(self.runner.model, self.runner.cache, self.runner.layout)
        return self

    def open(self, tokens: list[int]) -> Sequence:
        """Return a sequence with pages, of which nothing has run."""
        # With prompt logprobs the logits of every row are computed.
        request = Request("x", tuple(tokens), SamplingParams(prompt_logprobs=0), 0, 0)
        seq = Sequence(0, request, list(tokens))
        assert self.runner.reserve(seq, self.context), "pages for every sequence"
        return seq

    def close(self, seq: Sequence) -> None:
        self.runner.trim(seq, 0)

    def run(self, *parts: Part) -> list[Tensor]:
        """Run all parts in one step and return the logits of each."""
        shares = [ScheduledSequence.of(seq, take) for seq, take, _ in parts]
        output = self.runner.forward(shares, [draft for _, _, draft in parts])
        for seq, take, _ in parts:
            seq.num_computed_tokens += take
        return list(torch.split(output.logits, [take + len(draft) for _, take, draft in parts]))

    def read(self, tokens: list[int], piece: int | None = None) -> Tensor:
        """Return the logits after each token of a sequence that runs alone, prefilled in chunks."""
        seq = self.open(tokens)
        sizes = [min(piece or len(tokens), len(tokens) - at) for at in range(0, len(tokens), piece or len(tokens))]
        rows = torch.cat([self.run((seq, size, Draft()))[0] for size in sizes])
        self.close(seq)
        return rows
