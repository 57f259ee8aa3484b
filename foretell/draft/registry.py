"""Drafters by name: which there are, what they need before they can be made, and how they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from foretell.config import SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.cross_tokenizer.drafter import CrossTokenizerDrafter
from foretell.draft.cross_tokenizer.vocab_map import VocabMap
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.block import BlockDrafter
from foretell.draft.heads.distilled import DistilledDrafter
from foretell.draft.heads.eagle import EagleDrafter
from foretell.draft.heads.medusa import MedusaDrafter
from foretell.draft.heads.sampling import DraftTemperature
from foretell.draft.isolated import isolated
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.model import MAX_ROWS, ModelDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.predicted_output import PredictedOutputDrafter
from foretell.draft.self_draft import SelfDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.errors import RequestError
from foretell.models.decoder import Decoder, first_layers
from foretell.models.draft_heads import BlockHead, DistilledHead, DraftHead, EagleHead, MtpHead
from foretell.models.draft_heads.loading import head_kind
from foretell.models.quantize import QuantFormat
from foretell.options import nearest
from foretell.runner.heads.kv import HeadPages
from foretell.runner.model_runner import ModelRunner
from foretell.tokenizer import Tokenizer


def head_drafter(
    runner: ModelRunner,
    head: DraftHead[Any],
    first: int,
    name: str,
    draft_temperature: DraftTemperature = "fixed",
    min_confidence: float = 0.0,
    whole: bool | None = None,
) -> HeadDrafter:
    """The drafter of a head whose layers stand in the target's cache from `first` on; `whole`: see `HeadDrafter`."""
    pages = HeadPages.of(head, runner.cache, first)
    kind: type[HeadDrafter] = MedusaDrafter
    if isinstance(head, BlockHead):
        kind = BlockDrafter
    elif isinstance(head, EagleHead | MtpHead):
        kind = EagleDrafter
    elif isinstance(head, DistilledHead):
        kind = DistilledDrafter
    return kind(runner, head, pages, name, draft_temperature, min_confidence, whole)


OUTSIDE = "foretell.drafters"  # the entry points under which other packages offer theirs


@dataclass(frozen=True)
class LoadedDraftModel:
    """A draft model, loaded."""

    runner: ModelRunner
    tokenizer: Tokenizer | None = None
    vocabularies: VocabMap | None = None  # where its tokenizer is not the target's
    max_rows: int = MAX_ROWS  # of one forward, as memory was planned


@dataclass(frozen=True)
class PlacedHead:
    """A head, loaded, whose layers stand in the target's cache from `first` on."""

    head: DraftHead[Any]
    first: int


@dataclass(frozen=True)
class DrafterParts:
    """What drafters are made of."""

    config: SpeculationConfig
    target: ModelRunner
    tokenizer: Tokenizer | None = None
    helpers: Mapping[str, LoadedDraftModel] = field(default_factory=dict)  # draft models by name
    copies: Mapping[QuantFormat, Decoder] = field(default_factory=dict)  # quantized copies of the target
    heads: Mapping[str, PlacedHead] = field(default_factory=dict)  # by the name of their drafter

    @property
    def vocab(self) -> int:
        return self.target.model.config.vocab

    @property
    def sharpening(self) -> DraftTemperature:
        return "entropy" if self.config.draft_temperature == "entropy" else "fixed"


Maker = Callable[[DrafterParts, str], Drafter]  # the second is what stands behind the colon of its name


@dataclass(frozen=True)
class DrafterKind:
    """One way to guess ahead. `argument` shows what stands behind the colon, where something does."""

    name: str
    make: Maker
    argument: str = ""
    pattern: str = ".+"
    heavy: bool = False  # whether it has weights of its own
    rests: bool = True  # of a heavy one: whether it may give its memory back while nobody uses it

    @property
    def shown(self) -> str:
        if not self.argument:
            return self.name
        return f"{self.name}[:{self.argument}]" if re.fullmatch(self.pattern, "") else f"{self.name}:{self.argument}"

    def check(self, argument: str) -> None:
        """Refuse an argument that cannot be right, before anything is loaded."""
        if not self.argument and argument:
            raise RequestError("drafter", f"{self.name} takes nothing behind a colon")
        if self.argument and not re.fullmatch(self.pattern, argument):
            raise RequestError("drafter", f"{self.name} is written {self.shown}, not {self.name}:{argument}")


def _draft_model(parts: DrafterParts, name: str) -> Drafter:
    return _model_drafter(parts, name, f"model:{name}")


def _distilled(parts: DrafterParts, folder: str) -> Drafter:
    name = named("distilled", folder)
    if name in parts.heads:
        drafter = _head("distilled")(parts, folder)
    else:
        drafter = _model_drafter(parts, name, name)
        drafter.prior = 0.6
    drafter.cost_share = 0.25
    return drafter


def _model_drafter(parts: DrafterParts, helper_name: str, name: str) -> Drafter:
    helper, settings = parts.helpers[helper_name], (name, parts.sharpening, parts.config.min_confidence)
    drafter: ModelDrafter
    if helper.vocabularies is not None:
        drafter = CrossTokenizerDrafter(helper.runner, helper.vocabularies, *settings)
    else:
        kind = GraphModelDrafter if helper.runner.device.type == "cuda" else ModelDrafter
        drafter = kind(helper.runner, parts.vocab, *settings)
    drafter.max_rows = helper.max_rows
    return drafter


def _early_exit(parts: DrafterParts, layers: str) -> Drafter:
    most = parts.target.model.config.layers - 1
    if int(layers) > most:
        raise RequestError("drafter", f"exit:{layers} leaves nothing out; this model can exit after 1 to {most} layers")
    runner = parts.target.with_variant(first_layers(parts.target.model, int(layers)))
    return SelfDrafter(runner, parts.vocab, f"exit:{layers}", parts.sharpening, parts.config.min_confidence)


def _quantized_self(parts: DrafterParts, form: str) -> Drafter:
    runner = parts.target.with_variant(parts.copies["int8" if form == "int8" else "int4"])
    drafter = SelfDrafter(runner, parts.vocab, f"self:{form}", parts.sharpening, parts.config.min_confidence)
    drafter.prior = 0.9
    return drafter


def _head(kind: str) -> Maker:
    def make_drafter(parts: DrafterParts, folder: str) -> Drafter:
        name = named(kind, folder)
        placed = parts.heads[name]
        settings = (name, parts.sharpening, parts.config.min_confidence)
        return head_drafter(parts.target, placed.head, placed.first, *settings)

    return make_drafter


def named(kind: str, argument: str) -> str:
    """The name of a drafter of a kind."""
    return f"{kind}:{argument}" if argument else kind


HEADS = ("eagle", "block", "medusa", "mtp")


def is_head(drafter: str) -> bool:
    """Whether a drafter's weights are a head's. A distilled draft is, unless its folder is a whole model's."""
    kind, _, folder = drafter.partition(":")
    if kind == "distilled":
        return not folder or head_kind(Path(folder)) == kind
    return kind in HEADS


KINDS: dict[str, DrafterKind] = {
    kind.name: kind
    for kind in (
        DrafterKind("ngram", lambda parts, _: NGramDrafter(*parts.config.match_lengths)),
        DrafterKind("suffix", lambda parts, _: SuffixDrafter()),
        DrafterKind("recycle", lambda parts, _: TokenRecyclingDrafter()),
        DrafterKind("lookahead", lambda parts, _: LookaheadDrafter()),
        DrafterKind("prediction", lambda parts, _: PredictedOutputDrafter()),
        DrafterKind("model", _draft_model, "NAME", heavy=True),
        DrafterKind("self", _quantized_self, "int8", "int8|int4", heavy=True),
        DrafterKind("exit", _early_exit, "N", r"[1-9]\d*"),
        *(DrafterKind(kind, _head(kind), "FOLDER", ".*", heavy=True, rests=False) for kind in HEADS),
        DrafterKind("distilled", _distilled, "FOLDER", ".*", heavy=True, rests=False),
    )
}


def find_kind(name: str) -> DrafterKind:
    """The kind of that name, ours or another package's."""
    if name in KINDS:
        return KINDS[name]
    outside = {point.name: point for point in entry_points(group=OUTSIDE)}
    if name not in outside:
        shown = [kind.shown for kind in KINDS.values()]
        raise RequestError("drafter", f"{name!r} is not known; {nearest(name, ['none', 'auto', *shown, *outside])}")
    return DrafterKind(name, outside[name].load(), "...", ".*")


def make(parts: DrafterParts, name: str) -> Drafter:
    """The drafter of that name."""
    kind, _, argument = name.partition(":")
    drafter = find_kind(kind).make(parts, argument)
    if not isinstance(drafter, Drafter):
        raise RequestError("drafter", f"{name} is offered by another package and is no Drafter, but {drafter!r}")
    drafter.name = name  # what it is asked for by
    return isolated(drafter)
