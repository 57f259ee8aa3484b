"""Asks a smaller model, token by token, for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.draft.base import Drafter
from foretell.draft.heads.sampling import DraftTemperature, SampledToken, draw_nodes
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Request, ScheduledSequence, Sequence

MAX_ROWS = 512  # rows of one forward, where memory was planned for no other number


@dataclass
class _Shadow:
    """What the draft model has read of a sequence, in pages of its own."""

    seq: Sequence
    agreed: int = 0  # tokens known to be the text's, which only ever grows


@dataclass
class _Chain:
    """A draft in the making."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    sureness: float = 1.0


class ModelDrafter(Drafter):
    """Its own runner, and a shadow of each sequence that keeps what the two agree on."""

    traits = DrafterTraits(samples=True, gives_probability=True, needs_prefill=True)
    max_rows = MAX_ROWS

    def __init__(
        self,
        runner: ModelRunner,
        vocab: int,
        name: str = "model",
        draft_temperature: DraftTemperature = "fixed",
        min_confidence: float = 0.0,
    ) -> None:
        """`vocab` is the target's; `min_confidence`: a chain less likely than this is not drafted further."""
        self.runner, self.vocab, self.name = runner, vocab, name
        self.draft_temperature, self.min_confidence = draft_temperature, min_confidence
        self._shadows: dict[int, _Shadow] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        chains = {seq.id: _Chain() for seq in seqs}
        wishes = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.depth]
        asked = {seq.id for seq, _ in wishes}
        live = [(seq, budget) for seq, budget in wishes if self._ready(seq, budget.depth, asked)]
        self._prefill([self._shadows[seq.id].seq for seq, _ in live])
        for offset in range(max((budget.depth for _, budget in live), default=0)):
            live = [(seq, budget) for seq, budget in live if self._goes_on(chains[seq.id], offset, budget)]
            if not live:
                break
            drawn = self._draw([seq for seq, _ in live], offset)
            for i, (seq, _) in enumerate(live):
                self._append(seq, chains[seq.id], drawn, i)
        return [self._draft(seq, chains[seq.id]) for seq in seqs]

    def _ready(self, seq: Sequence, nodes: int, asked: set[int]) -> bool:
        """Bring the shadow up to the sequence; False where the draft's context or pages do not suffice."""
        if len(seq.tokens) + nodes > self.runner.context:
            return False
        return self._reserve(self._catch_up(seq), len(seq.tokens) + nodes, asked)

    def _prefill(self, shadows: list[Sequence]) -> None:
        """Run pending tokens, at most `max_rows` in a forward, until the rest of all sequences fits into one."""
        while sum(shadow.pending for shadow in shadows) > self.max_rows and (shares := self._chunks(shadows)):
            self.runner.forward(shares, [NO_DRAFT] * len(shares))
            for share in shares:
                share.seq.cached += share.num_new_tokens

    def _chunks(self, shadows: list[Sequence]) -> list[ScheduledSequence]:
        """Return the next forward of a prefill; the last token of a sequence runs with its first draft token."""
        shares, left = list[ScheduledSequence](), self.max_rows
        for shadow in shadows:
            take = min(shadow.pending - 1, left)
            if take > 0:
                shares.append(ScheduledSequence.of(shadow, take))
                left -= take
        return shares

    def _catch_up(self, seq: Sequence) -> Sequence:
        """Keep what shadow and sequence agree on: rejection, pre-emption and other drafters' turns need no more."""
        shadow = self._shadow(seq)
        mine = shadow.seq
        agreed = shadow.agreed
        while agreed < min(len(mine.tokens), len(seq.tokens)) and mine.tokens[agreed] == seq.tokens[agreed]:
            agreed += 1
        mine.tokens[agreed:] = seq.tokens[agreed:]
        mine.cached = min(mine.cached, agreed, len(seq.tokens) - 1)
        shadow.agreed = len(seq.tokens)
        return mine

    def _shadow(self, seq: Sequence) -> _Shadow:
        """Empty at first. It is made once: a request's parameters are checked, which takes longer than a look at it."""
        if seq.id not in self._shadows:
            self._shadows[seq.id] = _Shadow(Sequence(seq.id, _blank(seq), []))
        return self._shadows[seq.id]

    def _reserve(self, shadow: Sequence, tokens: int, keep: set[int]) -> bool:
        """Pages for the shadow, taken from shadows that are not asked for now if need be."""
        while not self.runner.reserve(shadow, tokens):
            victim = next((s.seq for s in self._shadows.values() if s.seq.pages and s.seq.id not in keep), None)
            if victim is None:
                return False
            victim.cached = 0
            self.runner.trim(victim, 0)
        return True

    def _goes_on(self, chain: _Chain, offset: int, budget: Budget) -> bool:
        """Decided by what was drawn before, never by the token to come."""
        return offset < budget.depth and chain.sureness >= max(self.min_confidence, budget.min_probability)

    def _draw(self, seqs: list[Sequence], offset: int) -> SampledToken:
        shadows = [self._shadows[seq.id].seq for seq in seqs]
        output = self.runner.forward(
            [ScheduledSequence.of(shadow, shadow.pending) for shadow in shadows], [Draft()] * len(seqs)
        )
        return draw_nodes(_fit(output.logits, self.vocab), seqs, offset, self.draft_temperature)

    def _append(self, seq: Sequence, chain: _Chain, drawn: SampledToken, i: int) -> None:
        shadow = self._shadows[seq.id].seq
        shadow.cached = len(shadow.tokens)
        shadow.tokens.append(drawn.tokens[i])
        chain.tokens.append(drawn.tokens[i])
        chain.probs.append(drawn.probs[i])
        chain.confidence.append(drawn.confidence[i])
        chain.sureness *= drawn.confidence[i]

    def _draft(self, seq: Sequence, chain: _Chain) -> Draft:
        if not chain.tokens:
            return Draft()
        parents = tuple(range(-1, len(chain.tokens) - 1))
        drawn = (seq.request.params.temperature > 0,) * len(parents)
        return Draft(tuple(chain.tokens), parents, self.name, drawn, tuple(chain.confidence), torch.stack(chain.probs))

    def forget(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.id, None)
        if shadow is not None:
            self.runner.trim(shadow.seq, 0)


def _blank(seq: Sequence) -> Request:
    """The draft model reads all of the text and is asked for nothing but scores."""
    return Request(seq.request.id, (), SamplingParams(), 0, 0)


def _fit(logits: Tensor, vocab: int) -> Tensor:
    """Scores over the target's vocabulary; padded vocabularies of one family differ in length."""
    missing = vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, :vocab]


class SelfDrafter(ModelDrafter):
    """Reads the target's pages for what is cached and writes behind it; the check that follows writes over that.

    It keeps nothing of its own: pages for a step's guesses are reserved with the step, and what a draft left there is
    rewritten by the target before the target reads it.
    """

    traits = DrafterTraits(samples=True, gives_probability=True)

    def _catch_up(self, seq: Sequence) -> Sequence:
        shadow = self._shadow(seq).seq
        shadow.tokens, shadow.cached, shadow.pages = list(seq.tokens), seq.cached, seq.pages
        return shadow

    def _reserve(self, shadow: Sequence, tokens: int, keep: set[int]) -> bool:
        return self.runner.pool.pages_for(tokens) <= len(shadow.pages)

    def forget(self, seq: Sequence) -> None:
        self._shadows.pop(seq.id, None)  # the pages are the target's, who gives them back itself
