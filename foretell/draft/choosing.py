"""What hangs below the nodes of a head's trees: its likeliest tokens, those that win the text's own race, or draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.sampling import noise
from foretell.sampling.native_choice import chooser, draw_rows
from foretell.types import Sequence

from .drawing import DraftTemperature, draft_params, draft_probabilities
from .growing import ROOT
from .tree import MOST_WIDE, Children, Tree


@dataclass(frozen=True)
class Plot:
    """A text and the tree that grows behind it."""

    seq: Sequence
    tree: Tree

    @property
    def races(self) -> bool:
        """Whether the target's token is what wins a race: under `match`, whose noise the draft knows."""
        return self.seq.request.params.temperature > 0 and self.seq.request.rule == "match"

    @property
    def place(self) -> int:
        """Where in the text the next level's tokens would stand."""
        return len(self.seq.tokens) + self.tree.depth

    def before(self, node: int) -> int:
        """The token of a node, or of the root."""
        return self.seq.tokens[-1] if node == ROOT else self.tree.tokens[node]


def must_draw(seq: Sequence) -> bool:
    """Whether a text's guesses are judged by what they were drawn from, and so must be drawn."""
    return seq.request.params.temperature > 0 and seq.request.rule != "match"


class Chooser:
    """Grows trees by what a head says, over the tokens `ids`."""

    def __init__(self, ids: Tensor, temperature: DraftTemperature) -> None:
        self.ids, self.temperature = ids.contiguous(), temperature

    def grow(self, plots: list[Plot], logits: Tensor, rows: list[list[int]]) -> None:
        """Grow each tree by a level. `rows` tell for each node of each tree's level which of the logits [rows, outputs]
        are its own; where all nodes of a level have the same ones, they are made up once."""
        owners = {row: plot for plot, mine in zip(plots, rows, strict=True) for row in mine}
        likely = [row for row, plot in owners.items() if not must_draw(plot.seq)]
        some = logits if likely == list(range(len(logits))) else logits[likely]
        known = dict(zip(likely, self._likeliest(some, [owners[row] for row in likely]), strict=True))
        drawn = [row for row in owners if row not in known]
        shares = dict(zip(drawn, self._shares(logits[drawn], [owners[row] for row in drawn]), strict=True))
        for plot, mine in zip(plots, rows, strict=True):
            pairs = zip(plot.tree.level, mine, strict=True)
            plot.tree.grow(
                [known[row] if row in known else self._drawn(plot, node, shares[row]) for node, row in pairs]
            )

    def _likeliest(self, logits: Tensor, plots: list[Plot]) -> list[Children]:
        """The tokens that are likeliest to be the target's own, of logits [plots, outputs]."""
        if not plots:
            return []
        most = min(MOST_WIDE, logits.shape[-1])
        if (native := chooser(logits)) is not None:
            # One call: torch makes a dozen for a few rows, and its threads and the library's are in each other's way.
            found = native.odds(logits, self.ids, self._draws(logits, plots), most)
            return [Children(*each) for each in zip(*found, strict=True)]
        if any(plot.races for plot in plots):
            shares, at = self._odds(logits, plots).topk(most)
        else:
            best, at = logits.topk(most)
            shares = (best - logits.logsumexp(-1, keepdim=True)).exp()
        return [Children(*each) for each in zip(self.ids[at].tolist(), shares.tolist(), strict=True)]

    def _draws(self, logits: Tensor, plots: list[Plot]) -> bytes:
        """The races of the plots, as the library wants them."""
        params = draft_params(logits, [plot.seq.request.params for plot in plots], self.temperature)
        return draw_rows(params, [noise.key(plot.seq.request.seed, plot.place) for plot in plots])

    def _odds(self, logits: Tensor, plots: list[Plot]) -> Tensor:
        """How far each token is ahead in its text's race, as shares: a target that sees it as the head does takes the
        first, and the closer the second is, the likelier it takes that. Without a race, how likely each is."""
        races = torch.tensor([[plot.races] for plot in plots], device=logits.device)
        seeds = torch.tensor([plot.seq.request.seed for plot in plots], device=logits.device)
        places = torch.tensor([plot.place for plot in plots], device=logits.device)
        ahead = self._shares(logits, plots) / noise.exponential(seeds, places, noise.TOKEN_STREAM, self.ids)
        return torch.where(races, ahead / ahead.sum(-1, keepdim=True), logits.softmax(-1))

    def _shares(self, logits: Tensor, plots: list[Plot]) -> Tensor:
        """What is drawn from, as each request wants it."""
        if not plots:
            return logits
        return draft_probabilities(logits, [plot.seq.request.params for plot in plots], self.temperature)

    def _drawn(self, plot: Plot, node: int, probs: Tensor) -> Children:
        """As many children as are wanted, drawn without replacement: in the order in which a race ends."""
        request = plot.seq.request
        seed = torch.tensor([request.seed], device=probs.device)
        root = torch.tensor([len(plot.seq.tokens)], device=probs.device)
        race = probs / noise.draft_noise(seed, root, node + 1, self.ids)[0]
        count = min(plot.tree.wanted(node), int((probs > 0).sum()))
        order = race.topk(count).indices
        rows = probs.repeat(count, 1)
        for later in range(1, count):  # who is out cannot be drawn again
            rows[later:, order[later - 1]] = 0
        rows /= rows.sum(-1, keepdim=True)
        shares: list[float] = rows[torch.arange(count, device=rows.device), order].tolist()
        return Children(self.ids[order].tolist(), shares, rows)
