"""Bulk sampling of answers on a GPU without the engine: one CUDA graph replay per token for a thousand sequences.

The engine spends host time per sequence and step on features that generating training data does not need. Tokens are
sampled on the device by the Gumbel-max trick: the argmax of logits plus temperature times Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.models.decoder import Decoder

from .dense_forward import causal_attention, dense_forward, rope_tables

STEPS_PER_POLL = 16  # steps between two checks for finished sequences
KV_SPAN = 128  # attention runs over a multiple of this many KV positions; each multiple has its own CUDA graph
PREFILL_TOKENS = 32_768  # prompt tokens per prefill pass
TINY = 1e-20  # keeps the logarithm of the noise finite


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt for the target to answer, as training data."""

    index: int
    prompt: list[int]
    temperature: float
    max_tokens: int


class Sampler:
    """Decodes in slots with KV caches of a fixed size; a finished slot takes the next request."""

    def __init__(self, model: Decoder, slots: int, context: int, end_ids: frozenset[int], seed: int) -> None:
        self.model, self.slots, self.context = model, slots, context
        device, config = model.embed.device, model.config
        self.rope = rope_tables(model, context)
        shape = (config.layers, slots, config.kv_heads, context, config.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.last = torch.zeros(slots, dtype=torch.long, device=device)  # the last token of each slot
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)  # of `last`
        self.stop_positions = torch.zeros(slots, dtype=torch.long, device=device)  # a slot stops at this position
        self.temperature = torch.zeros(slots, device=device)
        self.outputs = torch.zeros(slots, context + 1, dtype=torch.long, device=device)  # prompt and output tokens
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.is_end = torch.zeros(config.vocab, dtype=torch.bool, device=device)
        self.is_end[[token for token in end_ids if token < config.vocab]] = True
        self.row = torch.arange(slots, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by KV span
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        torch.manual_seed(seed)

    @torch.inference_mode()
    def generate(self, requests: list[AnswerRequest]) -> Iterator[tuple[AnswerRequest, list[int]]]:
        """Yield each request with its output tokens as it finishes.

        The longest prompts go first, so that the KV span shrinks over time.
        """
        waiting = sorted(requests, key=lambda request: len(request.prompt), reverse=True)[::-1]
        running: dict[int, AnswerRequest] = {}
        while waiting or running:
            free = [slot for slot in range(self.slots) if slot not in running]
            admitted = [(slot, waiting.pop()) for slot in free[: len(waiting)]]
            running |= dict(admitted)
            self._prefill(admitted)
            positions = self._decode()
            active = self.active.tolist()
            done = {slot: request for slot, request in running.items() if not active[slot]}
            outputs = self.outputs.cpu() if done else self.outputs
            for slot, request in done.items():
                del running[slot]
                yield request, outputs[slot, len(request.prompt) : positions[slot] + 1].tolist()

    def _decode(self) -> list[int]:
        """Run some steps and return each slot's last position."""
        length = int(self.positions.max()) + 1
        for step in range(STEPS_PER_POLL):
            self._step(min(self.context, -(-(length + step) // KV_SPAN) * KV_SPAN))
        positions: list[int] = self.positions.tolist()
        return positions

    def _prefill(self, admitted: list[tuple[int, AnswerRequest]]) -> None:
        """Prefill prompts but for their last token, which the first decode step runs."""
        while admitted:
            count = max(1, PREFILL_TOKENS // len(admitted[0][1].prompt))
            batch, admitted = admitted[:count], admitted[count:]
            self._prefill_batch([slot for slot, _ in batch], [request for _, request in batch])

    def _prefill_batch(self, slots: list[int], requests: list[AnswerRequest]) -> None:
        device = self.last.device
        length = max(len(request.prompt) for request in requests)
        padded = [request.prompt + [0] * (length - len(request.prompt)) for request in requests]
        tokens, at = torch.tensor(padded, device=device), torch.tensor(slots, device=device)
        sizes = torch.tensor([len(request.prompt) for request in requests], device=device)
        if length > 1:
            positions = torch.arange(length - 1, device=device)
            dense_forward(self.model, self.rope, tokens[:, :-1], positions, _PrefillAttention(self, at))
        self.outputs[at, :length] = tokens
        self.last[at] = tokens[torch.arange(len(slots), device=device), sizes - 1]
        self.positions[at] = sizes - 1
        limits = [min(request.max_tokens, self.context - len(request.prompt)) for request in requests]
        self.stop_positions[at] = sizes - 1 + torch.tensor(limits, device=device)
        self.temperature[at] = torch.tensor([request.temperature for request in requests], device=device)
        self.active[at] = True

    def _step(self, span: int) -> None:
        if self.last.device.type != "cuda":
            self._forward(span)
            return
        if span not in self.graphs:
            self.graphs[span] = self._capture(span)
        self.graphs[span].replay()

    def _capture(self, span: int) -> torch.cuda.CUDAGraph:
        """Capture a step as a CUDA graph. The warm-up runs before it must not advance the sequences."""
        saved = [each.clone() for each in self._sequence_state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(span)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._forward(span)
        for current, before in zip(self._sequence_state, saved, strict=True):
            current.copy_(before)
        return graph

    @property
    def _sequence_state(self) -> tuple[Tensor, ...]:
        return (self.last, self.positions, self.outputs, self.active)

    def _forward(self, span: int) -> None:
        """Generate one token in every active slot."""
        attend = _DecodeAttention(self, span)
        x, _ = dense_forward(self.model, self.rope, self.last[:, None], self.positions[:, None], attend)
        logits = self.model.logits(x[:, 0])
        noise = torch.empty_like(logits).exponential_().clamp_min_(TINY).log_().neg_()
        sampled = (logits + self.temperature[:, None] * noise).argmax(-1)
        sampled = torch.where(self.active, sampled, self.last)
        positions = self.positions + self.active
        self.outputs[self.row, positions] = torch.where(self.active, sampled, self.outputs[self.row, positions])
        self.positions.copy_(positions)
        self.last.copy_(sampled)
        self.active &= ~self.is_end[sampled] & (positions < self.stop_positions)


class _PrefillAttention:
    """Causal attention over prompts, which stores their K and V in the slots."""

    def __init__(self, sampler: Sampler, slots: Tensor) -> None:
        self.sampler, self.slots, self.config = sampler, slots, sampler.model.config

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = k.shape[1]
        self.sampler.keys[layer][self.slots, :, :length] = k.transpose(1, 2)
        self.sampler.values[layer][self.slots, :, :length] = v.transpose(1, 2)
        config = self.config
        return causal_attention(q, k, v, config.scale, config.windows[layer], config.attention_softcap)


class _DecodeAttention:
    """Attention of one token per slot over the slot's KV cache."""

    def __init__(self, sampler: Sampler, span: int) -> None:
        self.sampler, self.span, self.config = sampler, span, sampler.model.config
        self.kv_position = torch.arange(span, device=sampler.last.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sampler, config = self.sampler, self.config
        keys, values = sampler.keys[layer], sampler.values[layer]
        keys[sampler.row, :, sampler.positions] = k[:, 0]
        values[sampler.row, :, sampler.positions] = v[:, 0]
        q = q.view(sampler.slots, config.kv_heads, -1, config.head_dim)
        scores = (q @ keys[:, :, : self.span].mT).float() * config.scale
        if (cap := config.attention_softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        masked = self.kv_position > sampler.positions[:, None]
        window = config.windows[layer]
        if window is not None:
            masked = masked | (self.kv_position <= sampler.positions[:, None] - window)
        probs = scores.masked_fill(masked[:, None, None], float("-inf")).softmax(-1)
        output = probs.to(values.dtype) @ values[:, :, : self.span]
        return output.reshape(sampler.slots, 1, config.heads, config.head_dim)
