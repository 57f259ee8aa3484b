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
    """The speculation settings of one request; None means the engine's default."""

    enabled: bool = True
    drafter: str | None = None  # one of the engine's, by name
    max_draft: int | None = None  # draft tokens per step
    rule: str | None = None  # verification rule
    acceptance_threshold: tuple[float, float] | None = None  # upper and lower, for the rule `confidence`
    workload: str | None = None  # preset of the upper threshold: code, json, narrative or auto
    prediction: str | None = None  # the expected output, for the drafter `prediction`
    prediction_is_inferred: bool = False  # found in the prompt: the usage of the response does not count it
    reference: str | None = None  # text that the output may quote and that the prompt has in another spelling
    deadline: float | None = None  # seconds for all of `max_tokens`, from the start of prefill
    min_tokens_per_second: float | None = None  # after the first token; slower sequences get priority for drafts
    details: bool = False  # report for each token its probability and the draft tokens rejected at its position


@dataclass(frozen=True)
class ReasoningMarkers:
    """The tokens with which a model starts and ends its reasoning."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenLogprob:
    """The logprob and rank of a token, and the top-k tokens at its position with their logprobs."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RejectedToken:
    """A rejected draft token with its drafter's confidence and the target's probability."""

    token: int
    confidence: float | None
    probability: float


@dataclass(frozen=True)
class TokenDetail:
    """The target's probability of an output token, its drafter's confidence, and the draft tokens rejected there.

    Probabilities are those under the request's sampling parameters; at temperature 0 the softmax of the logits.
    """

    probability: float
    confidence: float | None = None  # None: the target's own token, or a drafter without confidences
    rejected: tuple[RejectedToken, ...] = ()


# Token sequences that must not be completed, by length: the last tokens by all tokens before them. Grouped like this, a
# step finds the forbidden tokens with one lookup per length.
BadWords = Mapping[int, Mapping[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Request:
    """One sequence to generate, with everything that decides its tokens."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    choice: int = 0  # index among the `n` choices of a request
    tenant: str = ""
    speculation: SpeculationChoice = SpeculationChoice()
    rule: str = "match"
    bad_words: BadWords = field(default_factory=dict)
    reasoning: ReasoningMarkers | None = None
    prediction: tuple[int, ...] = ()  # the expected output, for the drafter `prediction`
    reference: tuple[int, ...] = ()  # what the output may quote besides the prompt, for the drafter `suffix`
    drafters: tuple[str, ...] = ()  # drafters that may draft for it; empty is plain decoding


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in progress. `tokens` is the source of truth; everything else can be rebuilt from it."""

    id: int
    request: Request
    tokens: list[int]
    num_computed_tokens: int = 0  # the KV cache of the target holds tokens[:num_computed_tokens]
    pages: list[int] = field(default_factory=list)
    published: int = 0  # leading pages that are in the prefix cache
    finish_reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """Return how many tokens the target has still to run."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Return whether the next step runs only the last output token.

        False for the last token of a prompt: the first output token does not wait for a draft.
        """
        return len(self.tokens) - self.num_computed_tokens == 1 and len(self.tokens) > len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining_tokens(self) -> int:
        """Return how many tokens may still be generated."""
        return self.request.max_tokens + len(self.request.prompt) - len(self.tokens)


@dataclass(frozen=True)
class Budget:
    """The draft that a sequence may have in a step; 0 nodes is plain decoding."""

    nodes: int = 0
    drafter: str = ""  # one of a mix; empty if there is only one drafter
    min_probability: float = 0.0  # a branch that is less likely to be accepted is not drafted further
    is_exploration: bool = False  # drafted only to measure the acceptance of a drafter that is not in use
    max_depth: int = 0  # length of the longest branch; 0: as long as there are nodes
    on_device: bool = False  # the step can run draft tokens that the host has not seen

    @property
    def depth(self) -> int:
        """Return the length of the longest branch."""
        return min(self.max_depth, self.nodes) if self.max_depth else self.nodes

    @property
    def is_tree(self) -> bool:
        """Return whether there are more nodes than one branch can have, which leaves some for alternatives."""
        return self.depth < self.nodes


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence in a step: `num_new_tokens` pending tokens and a draft of at most `budget`."""

    seq: Sequence
    num_new_tokens: int
    budget: Budget = Budget()
    start: int = 0  # cached tokens before this step
    length: int = 0  # known tokens before this step

    @classmethod
    def of(cls, seq: Sequence, num_new_tokens: int, budget: Budget = Budget()) -> ScheduledSequence:
        """Schedule a sequence as it is now."""
        return cls(seq, num_new_tokens, budget, seq.num_computed_tokens, len(seq.tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether every row needs logits, because the request wants the logprobs of its prompt."""
        return self.seq.request.params.prompt_logprobs is not None and self.start < len(self.seq.request.prompt)

    @property
    def reaches_end(self) -> bool:
        """Return whether this step runs the sequence's last token, and so yields at least one output token."""
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
    acceptance_by_depth: tuple[float, ...] = ()  # of a draft token if those before it were accepted; (): unknown
    defers_to_confident: bool = False  # its free draft is not needed where another free drafter is confident
    weight_bytes: int = 0  # weights on the target's device, reserved in the memory plan


_CHAINS = tuple(tuple(range(-1, nodes - 1)) for nodes in range(65))  # cached: needed several times per step


def chain_parents(nodes: int) -> tuple[int, ...]:
    """Return the parents of a draft without branches."""
    return _CHAINS[nodes] if nodes < len(_CHAINS) else tuple(range(-1, nodes - 1))


class DeviceDraft(Protocol):
    """Draft tokens of one sequence that are on the device and not known to the host."""

    @property
    def token_buffer(self) -> Tensor:
        """The flat device tensor that holds them, together with those of other sequences."""

    def wait(self) -> tuple[list[int], list[float]]:
        """Copy them to the host and return the tokens and the drafter's confidence in each."""


@dataclass(frozen=True)
class Draft:
    """Draft tokens of one sequence: a tree whose root is the sequence's last token.

    parents[i] is the parent of node i, or -1 for the root; parents come before their children.
    probs[i] is the distribution that node i was sampled from; a node that was not sampled needs none.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    source: str = ""  # the drafter
    sampled: tuple[bool, ...] | None = None  # None: no node was sampled
    confidence: tuple[float, ...] | None = None  # 0 to 1; a probability only if the drafter declares so
    probs: Tensor | None = None  # [nodes, vocab]
    origins: tuple[str, ...] | None = None  # the drafter of each node, if there are several
    device_draft: DeviceDraft | None = None  # a chain on the device: each token is -1 - its index in the token buffer

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "each node has a parent"

    @classmethod
    def chain(cls, tokens: list[int] | tuple[int, ...], source: str = "", probs: Tensor | None = None) -> Draft:
        """Return a draft without branches."""
        sampled = None if probs is None else (True,) * len(tokens)
        return cls(tuple(tokens), chain_parents(len(tokens)), source, sampled, None, probs)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def depths(self) -> list[int]:
        """Return the depth of each node; 1 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def is_sampled(self, node: int) -> bool:
        """Return whether a node was sampled; dropping it because of its value would bias the output."""
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
        """Return the nodes `kept`, in this order; each must come after its ancestors, which are kept too."""
        assert self.device_draft is None, "the tokens are not known to the host"
        if kept == list(range(len(self))):
            return self
        new_index = {-1: -1, **{node: index for index, node in enumerate(kept)}}
        return Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(new_index[self.parents[node]] for node in kept),
            self.source,
            self.sampled and tuple(self.sampled[node] for node in kept),
            self.confidence and tuple(self.confidence[node] for node in kept),
            None if self.probs is None else self.probs[kept],
            self.origins and tuple(self.origins[node] for node in kept),
        )

    def origin(self, node: int) -> str:
        """Return the drafter of a node."""
        return self.source if self.origins is None else self.origins[node]


NO_DRAFT = Draft()  # shared: constructing it would be the most expensive part of a step without drafts


@dataclass(frozen=True)
class VerifyResult:
    """The accepted nodes of a draft, root to leaf, and the target's token that follows them."""

    accepted_path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True)
class StepResult:
    """The result of a step for one sequence; drafters, controller and statistics learn from it.

    `target_tokens` are the target's own tokens after the root and after each node; `new_tokens` were appended to the
    sequence (a stop token or a limit can cut off accepted tokens). `hidden_states` has a row for each token that was
    run. `top_tokens` are the top-k tokens after the root and after each node, as many as the drafter wants.
    """

    scheduled: ScheduledSequence
    draft: Draft = Draft()
    verify_result: VerifyResult | None = None  # None: a prefill chunk that yields no output token
    target_tokens: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # of the new tokens, if the request wants them
    hidden_states: Tensor | None = None
    top_tokens: tuple[tuple[int, ...], ...] = ()
    details: tuple[TokenDetail, ...] | None = None  # of the new tokens, if the request wants them

    def with_new_tokens(self, new_tokens: tuple[int, ...]) -> StepResult:
        """Return the result with the tokens that were appended."""
        count = len(new_tokens)
        return StepResult(
            self.scheduled,
            self.draft,
            self.verify_result,
            self.target_tokens,
            new_tokens,
            self.logprobs and self.logprobs[:count],
            self.hidden_states,
            self.top_tokens,
            self.details and self.details[:count],
        )

    @property
    def num_accepted(self) -> int:
        """Return how many draft tokens were appended."""
        return 0 if self.verify_result is None else min(len(self.verify_result.accepted_path), len(self.new_tokens))


@dataclass(frozen=True)
class StepTimes:
    """The times of a step in seconds.

    `draft_seconds`: scheduling, drafting, and computing the top-k tokens that drafters learn from.
    `target_seconds`: the target's forward pass and verification.
    `propose_seconds`: the part of `draft_seconds` in drafters that were asked for a draft; the rest, such as polling
    free drafters and choosing lengths, is spent whichever drafter is chosen. None: all of it.
    `is_outlier`: something took longer than it will again, such as a CUDA graph capture; not to be learnt from.
    `host_gap`: how long the device was idle before the step, drafting aside, because the engine had to see the tokens
    of the previous step first; None unless both were decode steps, and without async scheduling.
    """

    draft_seconds: float
    target_seconds: float
    propose_seconds: float | None = None
    is_outlier: bool = False
    host_gap: float | None = None


@dataclass(frozen=True)
class Delta:
    """The output that one step added to one sequence."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    text: str
    origins: tuple[str, ...]  # for each token the drafter that proposed it, or TARGET
    num_drafted: int = 0  # draft tokens verified in this step
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    skip_reason: str = ""  # why nothing was drafted, if the controller says so
    drafter: str = ""  # the drafter of this step
    details: tuple[TokenDetail, ...] | None = None
