"""What a model costs, told by its sizes: weights, what a step reads of them, cache and operations."""

from __future__ import annotations

from dataclasses import dataclass

GATED, UNGATED = 3, 2  # matrices of a feed-forward


@dataclass(frozen=True)
class Experts:
    """A mixture: each row goes through `used` feed-forwards of `count`, and through one that all share."""

    count: int
    used: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0  # of the layers, those that have one ordinary feed-forward

    def touched(self, rows: float) -> float:
        """How many of them so many rows need, where each row's choice is as good as drawn at random."""
        missed: float = (1 - self.used / self.count) ** rows
        return self.count * (1 - missed)


@dataclass(frozen=True)
class Latent:
    """Keys and values kept as one small vector a token, as DeepSeek's models do."""

    rank: int
    rope: int
    plain: int
    value: int
    query_rank: int = 0  # 0: queries are made in one product


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    name: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    tied: bool = False
    matrices: int = GATED
    window: int | None = None  # tokens that `windowed` of the layers see
    windowed: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    bits: float | None = None  # a weight as the file has it; None leaves it to who plans

    @property
    def head_weights(self) -> int:
        return self.vocab * self.width

    @property
    def attention_weights(self) -> int:
        """Of one layer."""
        if self.latent is not None:
            return self._latent_weights(self.latent)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.width * (2 * queries + 2 * keys)

    def _latent_weights(self, latent: Latent) -> int:
        """Queries and what is cached are made in two products each, the first of them small."""
        query = self.heads * (latent.plain + latent.rope)
        through = latent.query_rank * (self.width + query) if latent.query_rank else self.width * query
        cached = self.width * (latent.rank + latent.rope) + latent.rank * self.heads * (latent.plain + latent.value)
        return through + cached + self.heads * latent.value * self.width

    def ffn_weights(self, experts: float) -> float:
        """Of all layers, where of each mixture so many experts count."""
        if self.experts is None:
            return float(self.matrices * self.width * self.ffn * self.layers)
        mixed = self.layers - self.experts.dense_layers
        each = experts * self.experts.ffn + self.experts.shared_ffn
        routers = mixed * self.width * self.experts.count
        return self.matrices * self.width * (self.experts.dense_layers * self.ffn + mixed * each) + routers

    @property
    def weights(self) -> float:
        """All of them."""
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self._but_embeddings(self.experts.count if self.experts else 1) + embeddings

    @property
    def row_weights(self) -> float:
        """Those that one row is multiplied with, the head included."""
        return self._but_embeddings(self.experts.used if self.experts else 1) + self.head_weights

    def read_weights(self, rows: float) -> float:
        """Those that a step of so many rows reads, the head included."""
        return self._but_embeddings(self.experts.touched(rows) if self.experts else 1) + self.head_weights

    def _but_embeddings(self, experts: float) -> float:
        norms = (2 * self.layers + 1) * self.width
        return self.layers * self.attention_weights + self.ffn_weights(experts) + norms

    @property
    def token_values(self) -> int:
        """What one layer keeps of a token."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope
        return 2 * self.kv_heads * self.head_dim

    @property
    def cached_values(self) -> int:
        """What the cache keeps of a token; our pages keep all of it, windows or not."""
        return self.layers * self.token_values

    def seen_tokens(self, context: float) -> float:
        """Over all layers, the tokens that a row attends to."""
        if self.window is None:
            return self.layers * context
        return (self.layers - self.windowed) * context + self.windowed * min(context, self.window)

    def seen_values(self, context: float) -> float:
        """What a step reads of the cache for a text of so many tokens."""
        return self.seen_tokens(context) * self.token_values

    def attention_operations(self, context: float) -> float:
        """Of one row over so many tokens, in all layers."""
        each = 2 * self.head_dim if self.latent is None else 2 * self.latent.rank + self.latent.rope
        return 2 * self.heads * each * self.seen_tokens(context)
