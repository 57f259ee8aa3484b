"""What an engine reaches of a data sheet, and what it spends beside the device's work."""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Family


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
    host_text: float  # the same for each further text
    guess: float  # seconds more where one text is guessed for: to ask, to judge
    guess_text: float  # the same for each further text
    row_sizes: tuple[int, ...] = ()  # steps are filled up to one of these, and larger ones run in passes of the last
    tile_rows: int = 1  # rows that attention fills up to
    link: float = 0.7  # of the bandwidth between devices

    def host_seconds(self, texts: float, guessed: bool) -> float:
        """What the host spends on a step before the device can go on."""
        plain = self.host + (texts - 1) * self.host_text
        return plain + self.guess + (texts - 1) * self.guess_text if guessed else plain

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
    host_text=0.03e-3,
    guess=0.03e-3,
    guess_text=0.019e-3,
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
    host_text=0.074e-3,
    guess=0.17e-3,
    guess_text=0.17e-3,
)


def usual(family: Family) -> Efficiency:
    """What to expect where nothing was measured."""
    return GPU if family == "gpu" else CPU
