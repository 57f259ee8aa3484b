"""A decoder run over one text, in pieces of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.attention import Span, group_spans
from foretell.kv.cache import KVCache, slots_of
from foretell.models.decoder import Decoder, ForwardBatch

PAGE = 4


class Reader:
    """Feeds a decoder one text; the pages lie backwards, so that nothing depends on their order."""

    def __init__(self, decoder: Decoder, context: int = 128) -> None:
        count = -(-context // PAGE)
        decoder.prepare(context)
        self.decoder, self.read = decoder, 0
        self.pages = tuple(reversed(range(count)))
        self.cache = KVCache(decoder.layer_shapes, count, PAGE, decoder.dtype, decoder.embed.device)
        self.layout = decoder.attention_layout(PAGE)

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> Tensor:
        """Logits after each of the tokens, which follow those fed before."""
        start, stop = self.read, self.read + len(tokens)
        span = Span(0, len(tokens), start, self.pages[: -(-stop // PAGE)])
        slots = torch.tensor(slots_of(self.pages, PAGE, start, stop))
        groups = group_spans([span], self.layout)
        batch = ForwardBatch(torch.tensor(tokens), torch.arange(start, stop), slots, groups)
        states, _ = self.decoder(batch, self.cache)
        self.read = stop
        return self.decoder.logits(states)


def logits(reader: Reader, tokens: list[int], piece: int | None = None) -> Tensor:
    """Logits after each token of a text fed in pieces."""
    reader.read = 0
    piece = piece or len(tokens)
    return torch.cat([reader.feed(tokens[i : i + piece]) for i in range(0, len(tokens), piece)])


def greedy(reader: Reader, tokens: list[int], count: int) -> list[int]:
    """Return the greedy continuation."""
    written = [int(logits(reader, tokens)[-1].argmax())]
    while len(written) < count:
        written.append(int(reader.feed(written[-1:])[-1].argmax()))
    return written


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
