"""Step time of a model on a device: a roofline model of memory traffic, compute and communication."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest
from foretell.plan.devices import Device, Family
from foretell.plan.model_shape import ModelShape

# Bits per weight, quantization scales included.
BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.25, "int4": 4.5}
AUTO = "auto"
TYPES = (AUTO, *BITS)


@dataclass(frozen=True)
class Precision:
    """A data type of weights: its bits, and the type the device computes in."""

    name: str
    bits: float

    @property
    def weight_bytes(self) -> float:
        return self.bits / 8

    def ops_per_second(self, device: Device) -> float:
        """Return operations per second. Types without hardware support are converted to a wider one first."""
        if self.name == "float32" and "float32" not in device.operations:
            return device.ops_per_second("bfloat16") / 2
        if self.name == "int4":
            return device.ops_per_second("int8" if device.family == "cpu" else "bfloat16")
        return device.ops_per_second(self.name)


def precision_of(dtype: str, shape: ModelShape, field: str) -> Precision:
    """Return the precision that was asked for; for `auto` that of the model's file, or bfloat16."""
    if dtype not in TYPES:
        raise RequestError(field, f"{dtype!r} is not known; {nearest(dtype, TYPES)}")
    if dtype != AUTO:
        return Precision(dtype, BITS[dtype])
    if shape.bits is None:
        return Precision("bfloat16", BITS["bfloat16"])
    if shape.bits > 8.5:
        return Precision("bfloat16", shape.bits)
    return Precision("int8" if shape.bits > 7 else "int4", shape.bits)


def cache_bytes(dtype: str, family: Family) -> float:
    """Return the bytes of one value in the KV cache; `auto` is half precision on a GPU and float32 on a CPU."""
    if dtype == AUTO:
        return 2.0 if family == "gpu" else 4.0
    if dtype not in BITS:
        raise RequestError("kv_dtype", f"{dtype!r} is not known; {nearest(dtype, TYPES)}")
    return BITS[dtype] / 8


@dataclass(frozen=True)
class Efficiency:
    """The fractions of a data sheet that an engine reaches, and overheads in seconds.

    Reading weights and computing with them add up and do not overlap, as measured on our kernels.
    """

    weights: float  # share of the bandwidth in reading weights
    cache: float  # share of the bandwidth in reading the KV cache
    products: float  # share of the operations in matrix products with weights
    attention: float  # share of the operations in attention
    layer: float  # seconds of launch overhead per layer
    host: float  # host seconds of a step with one sequence
    host_per_sequence: float  # host seconds of each further sequence
    draft_host: float  # further host seconds of a draft for one sequence: propose and verify
    draft_host_per_sequence: float  # host seconds of each further sequence
    row_sizes: tuple[int, ...] = ()  # row counts that steps are padded to; larger steps run in several passes
    tile_rows: int = 1  # multiple that attention pads rows to
    link: float = 0.7  # share of the bandwidth between devices

    def host_seconds(self, batch: float, has_drafts: bool) -> float:
        """Return the host seconds of a step, during which the device idles."""
        plain = self.host + (batch - 1) * self.host_per_sequence
        return plain + self.draft_host + (batch - 1) * self.draft_host_per_sequence if has_drafts else plain

    def passes(self, rows: float) -> list[float]:
        """Return the padded rows of each pass of a step."""
        if not self.row_sizes:
            return [rows]
        most = self.row_sizes[-1]
        full, rest = divmod(rows, most)
        padded = [next(size for size in self.row_sizes if size >= rest)] if rest else []
        return [float(most)] * int(full) + [float(size) for size in padded]

    def as_json(self) -> dict[str, Any]:
        """Return the fields under their names in the JSON of a plan, which are stable."""
        return {JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}


JSON_NAMES = {"host_per_sequence": "host_text", "draft_host": "guess", "draft_host_per_sequence": "guess_text"}


# Measured on an H200: a step of 5.9 billion weights 3.43 ms, of 0.135 billion 0.85 ms; 64 rows 1.26 times one row, and
# 1.86 times at 8192 tokens; 45 GB of KV cache in 11.4 ms; 0.48 ms on the host. Row sizes are those of the CUDA graphs.
# The host time of a further sequence was measured with a tiny model on a CPU.
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
# Measured on two cores of an AMD EPYC: int8 steps 5.2 ms, 16 rows 1.93 times one row, 4.3 us per cached token and
# 0.4 us for each further row.
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
    """Return the efficiency to assume without a calibration."""
    return GPU if family == "gpu" else CPU


ACTIVATION = 2  # bytes of a value in an all-reduce
LOGIT = 4  # bytes of a logit
EXCHANGES = 2  # all-reduces per layer: after attention and after the feed-forward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the device, by cause. The field names are those of the JSON."""

    weights: float  # reading weights
    products: float  # matrix products with weights
    attention: float  # reading the KV cache or computing with it, whichever takes longer
    layers: float  # launch overhead
    exchange: float  # all-reduce over devices

    @property
    def total(self) -> float:
        return self.weights + self.products + self.attention + self.layers + self.exchange


@dataclass(frozen=True)
class DeployedModel:
    """A model on one device, or split over several by tensor parallelism."""

    shape: ModelShape
    precision: Precision
    cache_bytes: float  # bytes of one value in the KV cache
    device: Device
    efficiency: Efficiency
    tensor_parallel: int = 1

    def with_efficiency(self, efficiency: Efficiency) -> DeployedModel:
        return replace(self, efficiency=efficiency)

    @property
    def kv_split(self) -> int:
        """Return the devices that the KV cache is split over: at most one per KV head."""
        return 1 if self.shape.latent is not None else min(self.tensor_parallel, self.shape.kv_heads)

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights on one device."""
        return self.shape.weights * self.precision.weight_bytes / self.tensor_parallel

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the KV cache bytes of a token on one device."""
        return self.shape.kv_values_per_token * self.cache_bytes / self.kv_split

    def step(self, batch: float, rows: float, context: float) -> StepTime:
        """Return the time of a step of `batch` sequences with `context` cached tokens and `rows` rows each."""
        return self._step(batch, rows, context, self.efficiency.passes(batch * rows))

    def _step(self, batch: float, rows: float, context: float, passes: list[float]) -> StepTime:
        efficiency, device = self.efficiency, self.device
        read = sum(map(self.shape.weights_read, passes)) * self.precision.weight_bytes
        products = 2 * sum(passes) * self.shape.active_weights
        return StepTime(
            weights=read / self.tensor_parallel / (device.bandwidth * efficiency.weights),
            products=products / self.tensor_parallel / (self.precision.ops_per_second(device) * efficiency.products),
            attention=self._attention(batch, rows, context),
            layers=len(passes) * self.shape.layers * efficiency.layer,
            exchange=sum(map(self._exchange, passes)),
        )

    def _attention(self, batch: float, rows: float, context: float) -> float:
        """Return the time of attention. Query heads that share a KV head are rows of one tile, which is padded."""
        efficiency, device, shape = self.efficiency, self.device, self.shape
        cached = batch * shape.attended_values(context) * self.cache_bytes
        reading = cached / self.kv_split / (device.bandwidth * efficiency.cache)
        group = shape.heads if shape.latent is not None else shape.heads / shape.kv_heads
        padded = math.ceil(rows * group / efficiency.tile_rows) * efficiency.tile_rows / group
        operations = batch * padded * shape.attention_operations(context)
        return max(
            reading, operations / self.tensor_parallel / (device.ops_per_second("bfloat16") * efficiency.attention)
        )

    def prefill_seconds(self, tokens: float, cached: float = 0.0, chunk: float = 2048) -> float:
        """Return the seconds of a chunked prefill of `tokens` tokens after `cached` ones."""
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
        all_reduce = link.latency + 2 * share * rows * self.shape.width * ACTIVATION / rate
        logits = link.latency + share * rows * self.shape.vocab * LOGIT / rate
        return EXCHANGES * self.shape.layers * all_reduce + logits
