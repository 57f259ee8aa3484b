"""Writes many texts at once on a GPU, without the engine: one graph replay a token for a thousand texts.

The engine's host time is spent on each text and each step; a trainer that wants millions of tokens of one model has no
use for what it buys. Tokens are drawn on the device: logits plus temperature times Gumbel noise, the largest wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.models.decoder import Decoder

from .dense_forward import causal_attention, dense_forward, rope_tables

LOOK = 16  # steps between two looks at who has finished
SPAN = 128  # keys are shown in multiples of this; each has a graph of its own
PREFILL = 32_768  # tokens of prompts read at once
FLAT = 1e-20  # keeps a logarithm finite


@dataclass(frozen=True)
class GenerationRequest:
    """A text to be written."""

    index: int
    prompt: list[int]
    temperature: float
    max_tokens: int  # tokens


class Sampler:
    """Slots with caches of a fixed size; a slot that has finished gets the next wish."""

    def __init__(self, model: Decoder, slots: int, context: int, end_ids: frozenset[int], seed: int) -> None:
        self.model, self.slots, self.context = model, slots, context
        device, config = model.embed.device, model.config
        self.tables = rope_tables(model, context)
        shape = (config.layers, slots, config.kv_heads, context, config.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.last = torch.zeros(slots, dtype=torch.long, device=device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)  # of `last`
        self.stop_positions = torch.zeros(
            slots, dtype=torch.long, device=device
        )  # the place no token is run at any more
        self.temperature = torch.zeros(slots, device=device)
        self.outputs = torch.zeros(slots, context + 1, dtype=torch.long, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.ends = torch.zeros(config.vocab, dtype=torch.bool, device=device)
        self.ends[[token for token in end_ids if token < config.vocab]] = True
        self.row = torch.arange(slots, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        torch.manual_seed(seed)

    @torch.inference_mode()
    def generate(self, wishes: list[GenerationRequest]) -> Iterator[tuple[GenerationRequest, list[int]]]:
        """Each wish with the tokens written, as they finish; the longest prompts go first, so that caches shrink."""
        waiting = sorted(wishes, key=lambda wish: len(wish.prompt), reverse=True)[::-1]
        busy: dict[int, GenerationRequest] = {}
        while waiting or busy:
            free = [slot for slot in range(self.slots) if slot not in busy]
            fresh = [(slot, waiting.pop()) for slot in free[: len(waiting)]]
            busy |= dict(fresh)
            self._read(fresh)
            self._run(busy)
            alive = self.active.tolist()
            done = {slot: wish for slot, wish in busy.items() if not alive[slot]}
            text = self.outputs.cpu() if done else self.outputs
            for slot, wish in done.items():
                del busy[slot]
                yield wish, text[slot, len(wish.prompt) : int(self._stop[slot]) + 1].tolist()

    def _run(self, busy: dict[int, GenerationRequest]) -> None:
        """Some steps; `_stop` then has each slot's last place."""
        reach = int(self.positions.max()) + 1
        for step in range(LOOK):
            self._step(min(self.context, -(-(reach + step) // SPAN) * SPAN))
        self._stop = self.positions.tolist()

    def _read(self, fresh: list[tuple[int, GenerationRequest]]) -> None:
        """Read prompts but for their last token, which the first step runs."""
        while fresh:
            longest = len(fresh[0][1].prompt)
            now, fresh = fresh[: max(1, PREFILL // longest)], fresh[max(1, PREFILL // longest) :]
            self._read_some([slot for slot, _ in now], [wish for _, wish in now])

    def _read_some(self, slots: list[int], wishes: list[GenerationRequest]) -> None:
        device = self.last.device
        length = max(len(wish.prompt) for wish in wishes)
        padded = [wish.prompt + [0] * (length - len(wish.prompt)) for wish in wishes]
        tokens, at = torch.tensor(padded, device=device), torch.tensor(slots, device=device)
        sizes = torch.tensor([len(wish.prompt) for wish in wishes], device=device)
        if length > 1:
            store = _Reading(self, at)
            dense_forward(self.model, self.tables, tokens[:, :-1], torch.arange(length - 1, device=device), store)
        self.outputs[at, :length] = tokens
        self.last[at] = tokens[torch.arange(len(slots), device=device), sizes - 1]
        self.positions[at] = sizes - 1
        room = torch.tensor([min(wish.max_tokens, self.context - len(wish.prompt)) for wish in wishes], device=device)
        self.stop_positions[at] = sizes - 1 + room
        self.temperature[at] = torch.tensor([wish.temperature for wish in wishes], device=device)
        self.active[at] = True

    def _step(self, span: int) -> None:
        if self.last.device.type != "cuda":
            self._advance(span)
            return
        if span not in self.graphs:
            self.graphs[span] = self._captured(span)
        self.graphs[span].replay()

    def _captured(self, span: int) -> torch.cuda.CUDAGraph:
        """A step as a graph. The run before it, which warms up, must not move the texts on."""
        kept = [each.clone() for each in self._moving]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._advance(span)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._advance(span)
        for mine, before in zip(self._moving, kept, strict=True):
            mine.copy_(before)
        return graph

    @property
    def _moving(self) -> tuple[Tensor, ...]:
        return (self.last, self.positions, self.outputs, self.active)

    def _advance(self, span: int) -> None:
        """One more token for every slot that is alive."""
        attend = _Writing(self, span)
        x, _ = dense_forward(self.model, self.tables, self.last[:, None], self.positions[:, None], attend)
        logits = self.model.logits(x[:, 0])
        noise = torch.empty_like(logits).exponential_().clamp_min_(FLAT).log_().neg_()
        chosen = (logits + self.temperature[:, None] * noise).argmax(-1)
        chosen = torch.where(self.active, chosen, self.last)
        after = self.positions + self.active
        self.outputs[self.row, after] = torch.where(self.active, chosen, self.outputs[self.row, after])
        self.positions.copy_(after)
        self.last.copy_(chosen)
        self.active &= ~self.ends[chosen] & (after < self.stop_positions)


class _Reading:
    """Prompts side by side; their keys and values are kept in their slots."""

    def __init__(self, sampler: Sampler, slots: Tensor) -> None:
        self.sampler, self.slots, self.config = sampler, slots, sampler.model.config

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = k.shape[1]
        self.sampler.keys[layer][self.slots, :, :length] = k.transpose(1, 2)
        self.sampler.values[layer][self.slots, :, :length] = v.transpose(1, 2)
        return causal_attention(q, k, v, self.config.scale, self.config.windows[layer])


class _Writing:
    """One row a slot, over what its slot has kept."""

    def __init__(self, sampler: Sampler, span: int) -> None:
        self.sampler, self.span, self.config = sampler, span, sampler.model.config
        self.place = torch.arange(span, device=sampler.last.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, config = self.sampler, self.config
        keys, values = own.keys[layer], own.values[layer]
        keys[own.row, :, own.positions] = k[:, 0]
        values[own.row, :, own.positions] = v[:, 0]
        q = q.view(own.slots, config.kv_heads, -1, config.head_dim)
        scores = (q @ keys[:, :, : self.span].mT).float() * config.scale
        hidden = self.place > own.positions[:, None]
        window = config.windows[layer]
        if window is not None:
            hidden = hidden | (self.place <= own.positions[:, None] - window)
        shares = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        seen = shares.to(values.dtype) @ values[:, :, : self.span]
        return seen.reshape(own.slots, 1, config.heads, config.head_dim)
