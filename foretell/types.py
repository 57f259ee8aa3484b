"""The values that travel between layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]

TARGET = "target"  # origin of a token that no drafter proposed


@dataclass(frozen=True)
class SpeculationChoice:
    """What one request wants of speculation; None leaves it to the engine."""

    enabled: bool = True
    drafter: str | None = None  # one of the engine's, by name
    max_draft: int | None = None
    rule: str | None = None
    acceptance_threshold: tuple[float, float] | None = None  # upper and lower, for the rule `confidence`
    workload: str | None = None  # a preset of the upper one: code, json, narrative or auto
    prediction: str | None = None  # the text that is expected, for the drafter `prediction`
    deadline: float | None = None  # seconds for all of `max_tokens`, from when the prompt is taken up
    min_tokens_per_second: float | None = None  # from the first token on; a text that is slower goes before others
    details: bool = False  # whether to tell of each token how likely it was found, and which guesses fell there


@dataclass(frozen=True)
class ReasoningMarkers:
    """How a model marks its thoughts."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token, its rank, and the likeliest ones there."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RejectedToken:
    """A guess that did not stand: how sure its drafter was, and how likely the target found it."""

    token: int
    confidence: float | None
    probability: float


@dataclass(frozen=True)
class TokenDetail:
    """Of one written token: how likely the target found it, how sure its drafter was, and the guesses that fell there.

    Probabilities are those of the request's settings; at temperature 0 those of the scores themselves.
    """

    probability: float
    confidence: float | None = None  # None: the target's own token, or a drafter that says nothing
    rejected: tuple[RejectedToken, ...] = ()


# Of runs by their length: what completes them, by all that stands before it. A step finds it without a look at each.
BadWords = Mapping[int, Mapping[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Request:
    """One text to be written: everything that decides it, settled before the first step."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    choice: int = 0
    tenant: str = ""
    speculation: SpeculationChoice = SpeculationChoice()
    rule: str = "match"
    bad_words: BadWords = field(default_factory=dict)  # runs of tokens that are never completed
    reasoning: ReasoningMarkers | None = None
    prediction: tuple[int, ...] = ()  # text the caller expects, for the drafter `prediction`
    drafters: tuple[str, ...] = ()  # those that may guess for it; none is plain decoding


@dataclass(eq=False, slots=True)
class Sequence:
    """A request being written. `tokens` is the truth; everything else can be rebuilt from it."""

    id: int
    request: Request
    tokens: list[int]
    cached: int = 0  # tokens[:cached] have their keys and values in the target's cache
    pages: list[int] = field(default_factory=list)
    published: int = 0  # of the pages, those offered to the prefix index
    finish_reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """Tokens that the target has still to run."""
        return len(self.tokens) - self.cached

    @property
    def is_decoding(self) -> bool:
        """Whether its next step runs the token it wrote last, and nothing else; a prompt's last token is none of those:
        the first token waits for no draft."""
        return len(self.tokens) - self.cached == 1 and len(self.tokens) > len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens written so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be written."""
        return self.request.max_tokens + len(self.request.prompt) - len(self.tokens)


@dataclass(frozen=True)
class Budget:
    """How much may be guessed for a sequence in this step; 0 nodes is plain decoding."""

    nodes: int = 0
    drafter: str = ""  # the arm of a mix; empty where there is one drafter
    min_probability: float = 0.0  # a branch less likely to stand than this does not pay to be drafted further
    is_exploration: bool = False  # whether it is only to learn how good a drafter is that is not used
    max_depth: int = 0  # the longest branch; 0: as long as there are nodes
    on_device: bool = False  # whether the step can run guesses that the host has not seen

    @property
    def depth(self) -> int:
        """The longest branch."""
        return min(self.max_depth, self.nodes) if self.max_depth else self.nodes

    @property
    def is_tree(self) -> bool:
        """Whether there are more nodes than one branch can have: what is left over is for second choices."""
        return self.depth < self.nodes


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's part of a step, as it was planned: `take` pending tokens and a draft of at most `budget`."""

    seq: Sequence
    num_new_tokens: int
    budget: Budget = Budget()
    start: int = 0  # tokens cached before this step
    length: int = 0  # tokens known before this step

    @classmethod
    def of(cls, seq: Sequence, take: int, budget: Budget = Budget()) -> ScheduledSequence:
        return cls(seq, take, budget, seq.cached, len(seq.tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every row counts, because the request wants to know how likely its prompt is."""
        return self.seq.request.params.prompt_logprobs is not None and self.start < len(self.seq.request.prompt)

    @property
    def reaches_end(self) -> bool:
        """Whether this step runs the sequence's last token, and so writes at least one more."""
        return self.start + self.num_new_tokens == self.length


@dataclass(frozen=True, kw_only=True)
class DrafterTraits:
    """Fixed properties of a drafter, declared once and read by engine, controller, server and benchmarks."""

    hidden_layers: tuple[int, ...] = ()  # target layers whose hidden states it reads
    top_k: int = 0  # most likely target tokens per row that it observes
    samples: bool = False  # its draft tokens are sampled where the request samples
    gives_probability: bool = False  # the confidence of a draft token is the probability it was drafted with
    makes_trees: bool = False  # a budget with more nodes than depth yields a tree
    single_graph: bool = False  # all levels run before the host sees one, so a draft that is cut short costs the same
    samples_single_graph: bool = True  # the same holds for sampled drafts that are verified by their probabilities
    draft_device: str = ""  # device on which draft tokens may stay when `Budget.on_device` allows it
    is_free: bool = False  # a draft costs next to nothing, so the controller may see it before it decides
    needs_prefill: bool = False  # has a KV cache of its own and prefills a sequence before its first draft token
    relative_cost: float = 0.3  # expected cost of a node before it is measured, relative to a plain step
    prior_acceptance: float = 0.5  # expected acceptance rate of a draft token before any is observed
    defers_to_confident: bool = False  # its free draft is not needed where another free drafter is confident
    weight_bytes: int = 0  # weights on the target's device, reserved in the memory plan


_CHAINS = tuple(tuple(range(-1, nodes - 1)) for nodes in range(65))  # asked for several times a step


def chain_parents(nodes: int) -> tuple[int, ...]:
    """Of a draft without branches."""
    return _CHAINS[nodes] if nodes < len(_CHAINS) else tuple(range(-1, nodes - 1))


class DeviceDraft(Protocol):
    """Guesses for a text that a device has made, or is about to, and that no host has seen."""

    @property
    def token_buffer(self) -> Tensor:
        """Where the device finds them: flat, those of other texts among them."""

    def wait(self) -> tuple[list[int], list[float]]:
        """Wait for them: the tokens, and how sure of each the drafter is."""


@dataclass(frozen=True)
class Draft:
    """Guessed continuations of one sequence: a tree whose root is the sequence's last token.

    parents[i] is the node before node i, or -1 for the root; parents always come first.
    probs[i] is the distribution node i was drawn from; a node that was not drawn at random needs none.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    source: str = ""
    sampled: tuple[bool, ...] | None = None  # None: no node was drawn at random
    confidence: tuple[float, ...] | None = None  # 0 to 1; a probability only where the drafter says it gives one
    probs: Tensor | None = None  # [nodes, vocab]
    origins: tuple[str, ...] | None = None  # who guessed each node, where several did
    device_draft: DeviceDraft | None = None  # a chain whose tokens are not known yet: each is -1 - its place in there

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "each node has a parent"

    @classmethod
    def chain(cls, tokens: list[int] | tuple[int, ...], source: str = "", probs: Tensor | None = None) -> Draft:
        """A draft without branches."""
        drawn = None if probs is None else (True,) * len(tokens)
        return cls(tuple(tokens), chain_parents(len(tokens)), source, drawn, None, probs)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def depths(self) -> list[int]:
        """1 for a node that hangs on the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def is_sampled(self, node: int) -> bool:
        """Whether a node was drawn at random; to drop it for its value would be a bias."""
        return self.sampled is not None and self.sampled[node]

    def truncate(self, nodes: int) -> Draft:
        """Return the first `nodes` nodes, none if negative; parents come first, so the result is a tree."""
        if nodes >= len(self):
            return self
        nodes = max(0, nodes)
        return Draft(
            self.tokens[:nodes],
            self.parents[:nodes],
            self.source,
            self.sampled and self.sampled[:nodes],
            self.confidence and self.confidence[:nodes],
            None if self.probs is None else self.probs[:nodes],
            self.origins and self.origins[:nodes],
            self.device_draft,
        )

    def subset(self, kept: list[int]) -> Draft:
        """Some of its nodes, in this order, each behind all before it on its branch."""
        assert self.device_draft is None, "nobody knows which to take"
        if kept == list(range(len(self))):
            return self
        places = {-1: -1, **{node: place for place, node in enumerate(kept)}}
        return Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(places[self.parents[node]] for node in kept),
            self.source,
            self.sampled and tuple(self.sampled[node] for node in kept),
            self.confidence and tuple(self.confidence[node] for node in kept),
            None if self.probs is None else self.probs[kept],
            self.origins and tuple(self.origins[node] for node in kept),
        )

    def origin(self, node: int) -> str:
        """Who guessed a node."""
        return self.source if self.origins is None else self.origins[node]


NO_DRAFT = Draft()  # an empty one is made once: it would be the dearest part of a step without guesses


@dataclass(frozen=True)
class VerifyResult:
    """What the target made of a draft: the accepted nodes, root to leaf, and the token that follows them."""

    accepted_path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True)
class StepResult:
    """What a step taught about one sequence: the same value for drafter, controller and statistics.

    `chosen` is the target's own token after the root and after each node, `kept` the tokens that entered the
    text (an end token or a limit can cut what the verdict accepted), `features` a row for each token that was run,
    `top` the likeliest tokens after the root and after each node, as many as the drafter wants to see.
    """

    scheduled: ScheduledSequence
    draft: Draft = Draft()
    verify_result: VerifyResult | None = None  # None: the prompt goes on, nothing was written
    target_tokens: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # of the kept tokens, where the request wants them
    hidden_states: Tensor | None = None
    top_tokens: tuple[tuple[int, ...], ...] = ()
    details: tuple[TokenDetail, ...] | None = None  # of the kept tokens, where the request wants them

    def with_new_tokens(self, kept: tuple[int, ...]) -> StepResult:
        """The same when it is known which tokens entered the text."""
        count = len(kept)
        return StepResult(
            self.scheduled,
            self.draft,
            self.verify_result,
            self.target_tokens,
            kept,
            self.logprobs and self.logprobs[:count],
            self.hidden_states,
            self.top_tokens,
            self.details and self.details[:count],
        )

    @property
    def num_accepted(self) -> int:
        """Guesses that entered the text."""
        return 0 if self.verify_result is None else min(len(self.verify_result.accepted_path), len(self.new_tokens))


@dataclass(frozen=True)
class StepTimes:
    """Seconds a step took: `drafting` to plan, to guess and to find out what drafters learn from, `running` for the
    target's forward and its judgement.

    `proposing` is the part of `drafting` that drafters took for the guesses they were asked for; the rest, such as
    looking at free guesses and deciding, is spent whoever guesses. None: all of it.

    `waiting`: what a device had nothing to do for before the step, guesses aside, because the engine had to
    know the tokens of the one before; None where it did not stand between two steps of written texts, or never goes
    ahead.

    `odd`: something took longer than it will take again, such as to be recorded, so the times tell of no price.
    """

    draft_seconds: float
    target_seconds: float
    propose_seconds: float | None = None
    is_outlier: bool = False
    host_gap: float | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to one text."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    text: str
    origins: tuple[str, ...]  # for each token the drafter that proposed it, or TARGET
    num_drafted: int = 0  # guesses checked in this step
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    skip_reason: str = ""  # why nothing was guessed, where the controller says so
    drafter: str = ""  # who guessed in this step
    details: tuple[TokenDetail, ...] | None = None
