"""How long one step of a model takes on a device, by what it must read, compute and exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .devices import Device
from .efficiency import Efficiency
from .precision import Precision
from .shapes import Shape

ACTIVATION = 2  # bytes of a value that devices exchange
LOGIT = 4
EXCHANGES = 2  # sums over devices in a layer: after attention and after the feed-forward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the device, by what they are spent on."""

    weights: float
    products: float
    attention: float  # to read what is cached or to compute with it, whichever takes longer
    layers: float
    exchange: float

    @property
    def total(self) -> float:
        return self.weights + self.products + self.attention + self.layers + self.exchange


@dataclass(frozen=True)
class Placed:
    """A model on so many devices that each have a part of every layer."""

    shape: Shape
    precision: Precision
    cache_bytes: float  # of one cached value
    device: Device
    efficiency: Efficiency
    split: int = 1

    def but(self, efficiency: Efficiency) -> Placed:
        return replace(self, efficiency=efficiency)

    @property
    def cache_split(self) -> int:
        """Over how many devices the cache is shared out: a key head lies on one of them at least."""
        return 1 if self.shape.latent is not None else min(self.split, self.shape.kv_heads)

    @property
    def weight_bytes(self) -> float:
        """On one device."""
        return self.shape.weights * self.precision.weight_bytes / self.split

    @property
    def token_bytes(self) -> float:
        """Of cache, on one device."""
        return self.shape.cached_values * self.cache_bytes / self.cache_split

    def step(self, texts: float, rows: float, context: float) -> StepTime:
        """So many texts of `context` cached tokens, each with so many rows to run."""
        return self._step(texts, rows, context, self.efficiency.passes(texts * rows))

    def _step(self, texts: float, rows: float, context: float, passes: list[float]) -> StepTime:
        reach, device = self.efficiency, self.device
        read = sum(map(self.shape.read_weights, passes)) * self.precision.weight_bytes
        products = 2 * sum(passes) * self.shape.row_weights
        return StepTime(
            weights=read / self.split / (device.bandwidth * reach.weights),
            products=products / self.split / (self.precision.rate(device) * reach.products),
            attention=self._attention(texts, rows, context),
            layers=len(passes) * self.shape.layers * reach.layer,
            exchange=sum(map(self._exchange, passes)),
        )

    def _attention(self, texts: float, rows: float, context: float) -> float:
        """Query heads that share keys are rows of one tile, which costs the same however full it is."""
        reach, device, shape = self.efficiency, self.device, self.shape
        cached = texts * shape.seen_values(context) * self.cache_bytes
        reading = cached / self.cache_split / (device.bandwidth * reach.cache)
        share = shape.heads if shape.latent is not None else shape.heads / shape.kv_heads
        filled = math.ceil(rows * share / reach.tile_rows) * reach.tile_rows / share
        operations = texts * filled * shape.attention_operations(context)
        return max(reading, operations / self.split / (device.rate("bfloat16") * reach.attention))

    def prompt(self, tokens: float, cached: float = 0.0, chunk: float = 2048) -> float:
        """Seconds to read a prompt of so many tokens behind what is cached, in chunks."""
        seconds, done = 0.0, 0.0
        while done < tokens:
            part = min(chunk, tokens - done)
            seconds += self._step(1, part, cached + done + part / 2, [part]).total
            done += part
        return seconds

    def _exchange(self, rows: float) -> float:
        if self.split == 1:
            return 0.0
        link, share = self.device.link, (self.split - 1) / self.split
        rate = link.bandwidth * self.efficiency.link
        one_sum = link.latency + 2 * share * rows * self.shape.width * ACTIVATION / rate
        logits = link.latency + share * rows * self.shape.vocab * LOGIT / rate
        return EXCHANGES * self.shape.layers * one_sum + logits
