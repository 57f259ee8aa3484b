"""How long one step of a model takes on a device, by what it must read, compute and exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foretell.errors import RequestError
from foretell.options import nearest
from foretell.plan.devices import Device, Family
from foretell.plan.model_shape import ModelShape

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.25, "int4": 4.5}  # scales included
AUTO = "auto"
TYPES = (AUTO, *BITS)


@dataclass(frozen=True)
class Precision:
    """Bits of a weight, and the type the device computes in."""

    name: str
    bits: float

    @property
    def weight_bytes(self) -> float:
        return self.bits / 8

    def ops_per_second(self, device: Device) -> float:
        """Operations a second; few bits that a device has no units for are widened first."""
        if self.name == "float32" and "float32" not in device.operations:
            return device.ops_per_second("bfloat16") / 2
        if self.name == "int4":
            return device.ops_per_second("int8" if device.family == "cpu" else "bfloat16")
        return device.ops_per_second(self.name)


def precision_of(dtype: str, shape: ModelShape, field: str) -> Precision:
    """As asked; left open, as the model's file has them, or half precision."""
    if dtype not in TYPES:
        raise RequestError(field, f"{dtype!r} is not known; {nearest(dtype, TYPES)}")
    if dtype != AUTO:
        return Precision(dtype, BITS[dtype])
    if shape.bits is None:
        return Precision("bfloat16", BITS["bfloat16"])
    return Precision("bfloat16" if shape.bits > 8.5 else "int8" if shape.bits > 7 else "int4", shape.bits)


def cache_bytes(dtype: str, family: Family) -> float:
    """Of one cached value; left open, half precision on a GPU and whole on a CPU."""
    if dtype == AUTO:
        return 2.0 if family == "gpu" else 4.0
    if dtype not in BITS:
        raise RequestError("kv_dtype", f"{dtype!r} is not known; {nearest(dtype, TYPES)}")
    return BITS[dtype] / 8


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's bandwidth and operations, and seconds that no data sheet knows.

    Reading weights and multiplying with them are added up, not overlapped: so it was measured on our kernels.
    """

    weights: float  # of the bandwidth, where weights are read
    cache: float  # of the bandwidth, where keys and values are read
    products: float  # of the operations, in products with weights
    attention: float  # of the operations, over cached tokens
    layer: float  # seconds a layer takes to begin and end, whatever its size
    host: float  # seconds a step costs the host, for one text
    host_per_sequence: float  # the same for each further text
    draft_host: float  # seconds more where one text is guessed for: to ask, to judge
    draft_host_per_sequence: float  # the same for each further text
    row_sizes: tuple[int, ...] = ()  # steps are filled up to one of these, and larger ones run in passes of the last
    tile_rows: int = 1  # rows that attention fills up to
    link: float = 0.7  # of the bandwidth between devices

    def host_seconds(self, texts: float, guessed: bool) -> float:
        """What the host spends on a step before the device can go on."""
        plain = self.host + (texts - 1) * self.host_per_sequence
        return plain + self.draft_host + (texts - 1) * self.draft_host_per_sequence if guessed else plain

    def passes(self, rows: float) -> list[float]:
        """The rows of each pass of a step, filled up."""
        if not self.row_sizes:
            return [rows]
        most = self.row_sizes[-1]
        whole, rest = divmod(rows, most)
        filled = [next(size for size in self.row_sizes if size >= rest)] if rest else []
        return [float(most)] * int(whole) + [float(size) for size in filled]


# From an H200: a step of 5.9 billion weights 3.43 ms, of 0.135 billion 0.85 ms; 64 rows 1.26 and at 8192 tokens 1.86 of
# one; 45 GB of cached values in 11.4 ms; 0.48 ms on the host. Sizes are those that the CUDA executor records, and what
# a further text costs the host was taken from the engine with a tiny model on a CPU.
GPU = Efficiency(
    weights=0.9,
    cache=0.75,
    products=0.8,
    attention=0.1,
    layer=25e-6,
    host=0.48e-3,
    host_per_sequence=0.03e-3,
    draft_host=0.03e-3,
    draft_host_per_sequence=0.019e-3,
    row_sizes=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256),
    tile_rows=16,
)
# From two cores of an AMD EPYC: int8 steps 5.2 ms, 16 rows 1.93 of one, 4.3 us a cached token and 0.4 a further row.
CPU = Efficiency(
    weights=0.9,
    cache=0.3,
    products=0.7,
    attention=0.4,
    layer=30e-6,
    host=0.59e-3,
    host_per_sequence=0.074e-3,
    draft_host=0.17e-3,
    draft_host_per_sequence=0.17e-3,
)


def default_efficiency(family: Family) -> Efficiency:
    """What to expect where nothing was measured."""
    return GPU if family == "gpu" else CPU


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
class DeployedModel:
    """A model on so many devices that each have a part of every layer."""

    shape: ModelShape
    precision: Precision
    cache_bytes: float  # of one cached value
    device: Device
    efficiency: Efficiency
    tensor_parallel: int = 1

    def with_efficiency(self, efficiency: Efficiency) -> DeployedModel:
        return replace(self, efficiency=efficiency)

    @property
    def kv_split(self) -> int:
        """Over how many devices the cache is shared out: a key head lies on one of them at least."""
        return 1 if self.shape.latent is not None else min(self.tensor_parallel, self.shape.kv_heads)

    @property
    def weight_bytes(self) -> float:
        """On one device."""
        return self.shape.weights * self.precision.weight_bytes / self.tensor_parallel

    @property
    def kv_bytes_per_token(self) -> float:
        """Of cache, on one device."""
        return self.shape.kv_values_per_token * self.cache_bytes / self.kv_split

    def step(self, texts: float, rows: float, context: float) -> StepTime:
        """So many texts of `context` cached tokens, each with so many rows to run."""
        return self._step(texts, rows, context, self.efficiency.passes(texts * rows))

    def _step(self, texts: float, rows: float, context: float, passes: list[float]) -> StepTime:
        reach, device = self.efficiency, self.device
        read = sum(map(self.shape.weights_read, passes)) * self.precision.weight_bytes
        products = 2 * sum(passes) * self.shape.active_weights
        return StepTime(
            weights=read / self.tensor_parallel / (device.bandwidth * reach.weights),
            products=products / self.tensor_parallel / (self.precision.ops_per_second(device) * reach.products),
            attention=self._attention(texts, rows, context),
            layers=len(passes) * self.shape.layers * reach.layer,
            exchange=sum(map(self._exchange, passes)),
        )

    def _attention(self, texts: float, rows: float, context: float) -> float:
        """Query heads that share keys are rows of one tile, which costs the same however full it is."""
        reach, device, shape = self.efficiency, self.device, self.shape
        cached = texts * shape.attended_values(context) * self.cache_bytes
        reading = cached / self.kv_split / (device.bandwidth * reach.cache)
        share = shape.heads if shape.latent is not None else shape.heads / shape.kv_heads
        filled = math.ceil(rows * share / reach.tile_rows) * reach.tile_rows / share
        operations = texts * filled * shape.attention_operations(context)
        return max(reading, operations / self.tensor_parallel / (device.ops_per_second("bfloat16") * reach.attention))

    def prefill_seconds(self, tokens: float, cached: float = 0.0, chunk: float = 2048) -> float:
        """Seconds to read a prompt of so many tokens behind what is cached, in chunks."""
        seconds, done = 0.0, 0.0
        while done < tokens:
            part = min(chunk, tokens - done)
            seconds += self._step(1, part, cached + done + part / 2, [part]).total
            done += part
        return seconds

    def _exchange(self, rows: float) -> float:
        if self.tensor_parallel == 1:
            return 0.0
        link, share = self.device.link, (self.tensor_parallel - 1) / self.tensor_parallel
        rate = link.bandwidth * self.efficiency.link
        one_sum = link.latency + 2 * share * rows * self.shape.width * ACTIVATION / rate
        logits = link.latency + share * rows * self.shape.vocab * LOGIT / rate
        return EXCHANGES * self.shape.layers * one_sum + logits
