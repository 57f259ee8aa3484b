"""The registry of drafters: names, arguments and constructors; drafters of other packages are found here too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from foretell.config import SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.corpus.drafter import CorpusDrafter, IndexedCorpus
from foretell.draft.cross_tokenizer.drafter import CrossTokenizerDrafter
from foretell.draft.cross_tokenizer.vocab_map import VocabMap
from foretell.draft.heads.assistant import AssistantDrafter
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.block import BlockDrafter
from foretell.draft.heads.eagle import DistilledDrafter, EagleDrafter
from foretell.draft.heads.medusa import MedusaDrafter
from foretell.draft.heads.sampling import DraftTemperature
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.model import MAX_ROWS, ModelDrafter, SelfDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.predicted_output import PredictedOutputDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.supervisor import isolate
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.errors import RequestError
from foretell.models.decoder import Decoder, first_layers
from foretell.models.draft_heads import AssistantHead, BlockHead, DistilledHead, DraftHead, EagleHead, MtpHead
from foretell.models.draft_heads.loading import head_kind
from foretell.models.quantize import QuantFormat
from foretell.options import closest, nearest
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
    single_graph: bool | None = None,
) -> HeadDrafter:
    """Return the drafter of a head whose KV layers begin at layer `first` of the target's cache."""
    pages = HeadPages.of(head, runner.cache, first)
    kind: type[HeadDrafter] = MedusaDrafter
    if isinstance(head, BlockHead):
        kind = BlockDrafter
    elif isinstance(head, EagleHead | MtpHead):
        kind = EagleDrafter
    elif isinstance(head, DistilledHead):
        kind = DistilledDrafter
    elif isinstance(head, AssistantHead):
        kind = AssistantDrafter
    return kind(runner, head, pages, name, draft_temperature, min_confidence, single_graph)


ENTRY_POINTS = "foretell.drafters"  # entry-point group in which other packages register drafters


@dataclass(frozen=True)
class LoadedDraftModel:
    """A loaded draft model, and the map of its tokens if its tokenizer differs."""

    runner: ModelRunner
    tokenizer: Tokenizer | None = None
    vocab_map: VocabMap | None = None  # if its tokenizer differs from the target's
    max_rows: int = MAX_ROWS  # of one forward, by the memory plan


@dataclass(frozen=True)
class PlacedHead:
    """A loaded head, and where its KV starts in the target's cache."""

    head: DraftHead[Any]
    first: int  # its first KV layer in the target's cache


@dataclass(frozen=True)
class DrafterParts:
    """The parts that drafters are built from."""

    config: SpeculationConfig
    target: ModelRunner
    tokenizer: Tokenizer | None = None
    draft_models: Mapping[str, LoadedDraftModel] = field(default_factory=dict)
    copies: Mapping[QuantFormat, Decoder] = field(default_factory=dict)  # quantized copies of the target, by format
    heads: Mapping[str, PlacedHead] = field(default_factory=dict)  # by name of their drafter
    corpus: IndexedCorpus | None = None  # files to draft from

    @property
    def vocab(self) -> int:
        """Vocabulary size of the target."""
        return self.target.model.config.vocab

    @property
    def draft_temperature(self) -> DraftTemperature:
        """Return how drafters choose their temperature."""
        return "entropy" if self.config.draft_temperature == "entropy" else "fixed"


Maker = Callable[[DrafterParts, str], Drafter]  # from the parts and the argument after the colon of the name


@dataclass(frozen=True)
class DrafterKind:
    """A row of the registry: how a drafter is named, checked and made."""

    name: str
    make: Maker
    argument: str = ""  # placeholder of the argument after the colon, for messages; "" for none
    pattern: str = ".+"  # regular expression of the argument
    is_heavy: bool = False  # has weights of its own
    can_unload: bool = True  # if heavy: its weights may be unloaded while it is idle

    @property
    def usage(self) -> str:
        """Return the name of the drafter on the command line."""
        if not self.argument:
            return self.name
        return f"{self.name}[:{self.argument}]" if re.fullmatch(self.pattern, "") else f"{self.name}:{self.argument}"

    def check(self, argument: str) -> None:
        """Raise if an argument is invalid, before anything is loaded."""
        if not self.argument and argument:
            raise RequestError("drafter", f"{self.name} takes no argument")
        if self.argument and not re.fullmatch(self.pattern, argument):
            raise RequestError("drafter", f"{self.name} is written {self.usage}, not {self.name}:{argument}")


def _draft_model(parts: DrafterParts, name: str) -> Drafter:
    return _model_drafter(parts, name, f"model:{name}")


def _distilled(parts: DrafterParts, folder: str) -> Drafter:
    name = drafter_name("distilled", folder)
    if name in parts.heads:
        drafter = _head("distilled")(parts, folder)
    else:
        drafter = _model_drafter(parts, name, name)
        drafter.traits = replace(drafter.traits, prior_acceptance=0.6)
    drafter.traits = replace(drafter.traits, relative_cost=0.25)
    return drafter


def _model_drafter(parts: DrafterParts, model_name: str, name: str) -> Drafter:
    model = parts.draft_models[model_name]
    settings = (name, parts.draft_temperature, parts.config.min_confidence)
    drafter: ModelDrafter
    if model.vocab_map is not None:
        drafter = CrossTokenizerDrafter(model.runner, model.vocab_map, *settings)
    else:
        kind = GraphModelDrafter if model.runner.device.type == "cuda" else ModelDrafter
        drafter = kind(model.runner, parts.vocab, *settings)
    drafter.max_rows = model.max_rows
    return drafter


def _early_exit(parts: DrafterParts, layers: str) -> Drafter:
    max_layers = parts.target.model.config.layers - 1
    if int(layers) > max_layers:
        raise RequestError("drafter", f"exit:{layers} skips no layer; this model can exit after 1 to {max_layers}")
    runner = parts.target.with_variant(first_layers(parts.target.model, int(layers)))
    return SelfDrafter(runner, parts.vocab, f"exit:{layers}", parts.draft_temperature, parts.config.min_confidence)


def _quantized_self(parts: DrafterParts, form: str) -> Drafter:
    runner = parts.target.with_variant(parts.copies["int8" if form == "int8" else "int4"])
    drafter = SelfDrafter(runner, parts.vocab, f"self:{form}", parts.draft_temperature, parts.config.min_confidence)
    drafter.traits = replace(drafter.traits, prior_acceptance=0.9)
    return drafter


def _head(kind: str) -> Maker:
    def make_drafter(parts: DrafterParts, folder: str) -> Drafter:
        name = drafter_name(kind, folder)
        placed = parts.heads[name]
        settings = (name, parts.draft_temperature, parts.config.min_confidence)
        return head_drafter(parts.target, placed.head, placed.first, *settings)

    return make_drafter


def _corpus(parts: DrafterParts, _: str) -> Drafter:
    assert parts.corpus is not None, "the drafter is only built with files"
    return CorpusDrafter(parts.corpus)


def drafter_name(kind: str, argument: str) -> str:
    """Return the name of a drafter of a kind."""
    return f"{kind}:{argument}" if argument else kind


HEADS = ("eagle", "block", "medusa", "mtp", "assistant")


def is_head(drafter: str) -> bool:
    """Return whether a drafter's weights are a head. A distilled draft is one, unless its folder has a full model."""
    kind, _, folder = drafter.partition(":")
    if kind == "distilled":
        return not folder or head_kind(Path(folder)) == kind
    return kind in HEADS


KINDS: dict[str, DrafterKind] = {
    kind.name: kind
    for kind in (
        DrafterKind("ngram", lambda parts, _: NGramDrafter(*parts.config.match_lengths)),
        DrafterKind("suffix", lambda parts, _: SuffixDrafter()),
        DrafterKind("corpus", _corpus),
        DrafterKind("recycle", lambda parts, _: TokenRecyclingDrafter()),
        DrafterKind("lookahead", lambda parts, _: LookaheadDrafter()),
        DrafterKind("prediction", lambda parts, _: PredictedOutputDrafter()),
        DrafterKind("model", _draft_model, "NAME", is_heavy=True),
        DrafterKind("self", _quantized_self, "int8 or self:int4", "int8|int4", is_heavy=True),
        DrafterKind("exit", _early_exit, "N", r"[1-9]\d*"),
        *(
            # No assistant ships with the package or is a part of its target.
            DrafterKind(
                kind, _head(kind), "FOLDER", ".+" if kind == "assistant" else ".*", is_heavy=True, can_unload=False
            )
            for kind in HEADS
        ),
        DrafterKind("distilled", _distilled, "FOLDER", ".*", is_heavy=True, can_unload=False),
    )
}


def find_kind(name: str) -> DrafterKind:
    """Return the kind of this name, built in or of another package."""
    if name in KINDS:
        return KINDS[name]
    outside = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in outside:
        names = ["none", "auto", *KINDS, *outside]
        shown = ["none", "auto", *(kind.usage for kind in KINDS.values()), *outside]
        hint = nearest(name, names if closest(name, names) else shown)
        raise RequestError("drafter", f"{name!r} is not known; {hint}")
    return DrafterKind(name, outside[name].load(), "...", ".*")


def make(parts: DrafterParts, name: str) -> Drafter:
    """Build the drafter of this name."""
    kind, _, argument = name.partition(":")
    drafter = find_kind(kind).make(parts, argument)
    if not isinstance(drafter, Drafter):
        raise RequestError("drafter", f"{name} of another package must return a Drafter, not {drafter!r}")
    drafter.name = name  # the name that requests use
    return isolate(drafter)
