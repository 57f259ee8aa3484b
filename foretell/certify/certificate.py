"""The whole check: four parts, one verdict."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from foretell.engine.verifier import rule_for
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.options import nearest
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, VerifyResult
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import LOSSLESS, LOSSY, Rule

from .distribution_test import (
    COUNT,
    FALSE_ALARM,
    FULL_DISTANCE,
    POWER,
    QUICK_DRAWS,
    SETTINGS,
    TREE,
    DistributionResult,
    check_draws,
    draws_for,
    found_by,
    sampling_drafter,
    tiny_engine,
)
from .draft_check import DraftCheckResult, check_guesses
from .evidence import Evidence, lacking
from .exact import ExactResult, check_exactly, drift
from .known_bugs import PLANTS, KnownBug, uniforms_of, with_rows
from .text_equality import PROMPTS, TextResult, check_texts, encode

PLANT_DRAWS = 4_000
Say = Callable[[str], None]
Conclusion = Literal["lossless", "not lossless", "inconclusive"]
OutsideRule = Callable[[Draft, Any, list[float]], VerifyResult]


@dataclass(frozen=True)
class CertifyJob:
    """What is to be certified."""

    rule: str = "match"
    plant: str | None = None
    quick: bool = False
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: int = 48
    past_the_end: bool = (
        False  # whether texts go on where the model would end them, so that so many tokens are compared
    )

    def __post_init__(self) -> None:
        known = [*LOSSLESS, *LOSSY, "module:function"]
        if ":" not in self.rule and self.rule not in known:
            raise RequestError("rule", f"{self.rule!r} cannot be certified; {nearest(self.rule, known)}")
        if self.max_tokens < 1:
            raise RequestError("max_tokens", f"must be 1 or more, not {self.max_tokens}")
        if self.plant is not None and self.from_outside:
            raise RequestError("plant", "is put into a built-in rule; leave out --rule")
        if self.plant is not None and self.plant not in PLANTS:
            raise RequestError("plant", f"{self.plant!r} is not known; {nearest(self.plant, PLANTS)}")

    @property
    def from_outside(self) -> bool:
        return ":" in self.rule

    @property
    def writes(self) -> bool:
        """Whether it comes to texts of the model: what is lossy by design, or has a bug in, is judged before."""
        return self.rule not in LOSSY and self.plant is None

    @property
    def rounds(self) -> int:
        """How often each text is written and compared: the other rules keep the distribution, not a seed's tokens."""
        return 2 if self.judged_as == "match" else 1

    @property
    def judged_as(self) -> str:
        """The name requests carry: a rule from outside and a planted bug stand in the place of `rejection`."""
        return "rejection" if self.from_outside or self.plant else self.rule


@dataclass
class Certificate:
    """What was found."""

    order: CertifyJob
    exact: list[ExactResult] = field(default_factory=list)
    draws: list[DistributionResult] = field(default_factory=list)
    texts: list[TextResult] = field(default_factory=list)
    guesses: list[DraftCheckResult] = field(default_factory=list)
    caught: dict[str, bool] = field(default_factory=dict)
    broken: str | None = None  # a rule from outside that failed on the way
    drift: float | None = None  # of a lossy rule: mean total variation a step

    @property
    def verdict(self) -> Conclusion:
        passed = [each.passed for each in self.exact] + [each.passed for each in self.draws]
        passed += [each.passed for each in self.texts] + [each.passed for each in self.guesses]
        if self.broken is not None or self.drift is not None or not all(passed) or not all(self.caught.values()):
            return "not lossless"
        return "inconclusive" if self.reasons else "lossless"

    @property
    def lossless(self) -> bool | None:
        """True and False are findings; None is inconclusive."""
        return {"lossless": True, "not lossless": False, "inconclusive": None}[self.verdict]

    @property
    def reasons(self) -> list[str]:
        """Return why the run is inconclusive, one line each; empty where all parts have enough evidence."""
        reasons = lacking("part 2", [each.evidence for each in self.draws])
        reasons += lacking("part 3", [each.evidence for each in self.texts])
        for each in self.guesses:
            reasons += each.lacking
        for result in self.texts:
            if len(result.differences) > result.most_near_ties:
                count = f"{len(result.differences)} of {result.texts} sequences differ at near-ties"
                reasons.append(
                    f"part 3, {result.setting}: {count}; "
                    f"plain decoding in a batch gives {result.control}, which explains at most {result.most_near_ties}"
                )
        return reasons if self.draws and self.texts else [*reasons, "not all parts were run"]

    @property
    def near_ties(self) -> int:
        return sum(len(result.differences) for result in self.texts)

    def as_json(self) -> dict[str, Any]:
        return {
            "lossless": self.lossless,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "rule": self.order.judged_as if self.order.plant else self.order.rule,
            "plant": self.order.plant,
            "quick": self.order.quick,
            "exact": [asdict(each) | {"passed": each.passed} for each in self.exact],
            "draws": [
                asdict(each) | {"passed": each.passed, "rejected": each.evidence.rejected} for each in self.draws
            ],
            "texts": [
                asdict(each)
                | {"passed": each.passed, "rejected": each.evidence.rejected, "most_near_ties": each.most_near_ties}
                for each in self.texts
            ],
            "guesses": [asdict(each) | {"passed": each.passed} for each in self.guesses],
            "near_ties": self.near_ties,
            "planted_bugs_caught": self.caught,
            "false_alarm": FALSE_ALARM,
            "power": POWER,
            "broken": self.broken,
            "drift": self.drift,
        }


def certify(order: CertifyJob, load: Callable[[], LLM], say: Say) -> Certificate:
    """Run all parts that apply. `load` gives the model and drafter to be certified, once the rule has passed."""
    found = Certificate(order)
    if order.rule in LOSSY:
        found.drift = drift(order.rule)
        say(f"{order.rule} is lossy by design: a mean total variation of {found.drift:.3f} a step in toy languages")
        return found
    if not order.from_outside and order.plant is None:
        say(f"1. every outcome of the rule {order.rule} over small vocabularies")
        found.exact.append(check_exactly(order.rule, order.quick))
        say(_exact_line(found.exact[-1]))
    _check_draws(found, say)
    if found.broken is None and order.writes:
        _check_texts(found, load, say)
    if not order.from_outside and order.plant is None:
        _check_plants(found, say)
    return found


def _check_draws(found: Certificate, say: Say) -> None:
    order = found.order
    draws = QUICK_DRAWS if order.quick else draws_for(FULL_DISTANCE, COUNT)
    reach = found_by(draws, COUNT)
    say(f"2. {draws} texts a setting through the engine: finds a total variation of {reach:.3f} with {POWER:.0%} power")
    plant = PLANTS.get(order.plant or "", KnownBug())
    rules = _rules(order, plant)
    for setting in SETTINGS if order.from_outside or order.plant else (*SETTINGS, TREE):
        engine = tiny_engine(plant.drafter(setting.drafter()), rules, setting.drafted)
        try:
            found.draws.append(check_draws(engine, order.judged_as, setting, draws))
        except Exception as error:
            _blame_outside(found, error, say)
            return
        say(_draw_line(found.draws[-1]))
        if order.plant is not None and not found.draws[-1].passed:
            return  # found out: more draws would only cost time


def _blame_outside(found: Certificate, error: Exception, say: Say) -> None:
    """Whatever a rule from outside does wrong is the finding; anything else is a fault of ours."""
    if not found.order.from_outside:
        raise error
    found.broken = f"{type(error).__name__}: {error}"
    say(f"   the rule failed: {found.broken}")


def _check_texts(found: Certificate, load: Callable[[], LLM], say: Say) -> None:
    order = found.order
    llm = load()
    if order.from_outside:
        llm.engine.verifier.sequence_verifier.rules = _rules(order, KnownBug())
    say(f"3. {len(order.prompts)} prompts with speculation on and off, drafter {llm.engine.drafter.name}")
    settings = [SamplingParams(max_tokens=order.max_tokens, ignore_eos=order.past_the_end)]
    if order.rounds > 1:
        settings.append(replace(settings[0], temperature=0.8, top_p=0.95, seed=17))
    for params in settings:
        try:
            found.texts.append(check_texts(llm, list(order.prompts), params, order.judged_as))
        except Exception as error:
            _blame_outside(found, error, say)
            return
        for line in _text_lines(found.texts[-1]):
            say(line)
    if llm.engine.drafter.draws and order.judged_as != "match":  # under `match` q decides nothing
        prompts = [encode(llm.tokenizer, prompt) for prompt in order.prompts]
        found.guesses.append(check_guesses(llm, prompts, order.judged_as, order.max_tokens))
        say(_guess_line(found.guesses[-1]))


def _check_plants(found: Certificate, say: Say) -> None:
    say("4. known bugs, planted")
    for name, plant in PLANTS.items():
        order = CertifyJob(rule="rejection", plant=name)
        found.caught[name] = any(_catches(plant, order, i) for i in (1, 2))
        say(f"   {name}: {'caught' if found.caught[name] else 'NOT CAUGHT'}")


def _catches(plant: KnownBug, order: CertifyJob, setting: int) -> bool:
    chosen = SETTINGS[setting]
    engine = tiny_engine(plant.drafter(sampling_drafter()), _rules(order, plant), chosen.drafted)
    return not check_draws(engine, "rejection", chosen, PLANT_DRAWS).passed


def _rules(order: CertifyJob, plant: KnownBug) -> Callable[[Request], Rule]:
    if order.from_outside:
        outside = _wrap(find_outside(order.rule))
        return lambda request: outside
    if plant.rule is not None:
        planted = plant.rule
        return lambda request: planted
    return rule_for


def find_outside(name: str) -> OutsideRule:
    """The function a user names as module:function."""
    module, _, function = name.partition(":")
    try:
        found: OutsideRule = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise RequestError("rule", f"{name!r} cannot be imported ({error}); name it as module:function") from None
    if not callable(found):
        raise RequestError("rule", f"{name!r} is not a function")
    return found


def _wrap(outside: OutsideRule) -> Rule:
    def rule(draft: Draft, probs: Any, chance: RandomSource, /) -> VerifyResult:
        verdict = outside(with_rows(draft, probs), probs, uniforms_of(draft, chance))
        _check_verdict(verdict, draft, probs.shape[-1])
        return verdict

    return rule


def _check_verdict(verdict: VerifyResult, draft: Draft, vocab: int) -> None:
    before = -1
    for node in verdict.accepted_path:
        if not 0 <= node < len(draft) or draft.parents[node] != before:
            raise ValueError(f"path {verdict.accepted_path} does not follow the draft")
        before = node
    if not 0 <= verdict.next_token < vocab:
        raise ValueError(f"next_token {verdict.next_token} is outside the vocabulary")


def _guess_line(result: DraftCheckResult) -> str:
    word = "passed" if result.passed else "FAILED"
    return f"   {word}: {result.guesses} guesses are drawn from what the drafter states: p = {result.p_value:.3g}"


def _exact_line(result: ExactResult) -> str:
    word = "passed" if result.passed else "FAILED"
    return f"   {word}: {result.cases} cases, largest total variation {result.worst:.1e} ({result.worst_case})"


def _draw_line(result: DistributionResult) -> str:
    word = "passed" if result.passed else "FAILED"
    return f"   {word}: {result.setting}: p = {result.p_value:.3g}; {_counts(result.evidence)}"


def _counts(evidence: Evidence) -> str:
    return f"{evidence.drafted} drafted, {evidence.accepted} accepted, {evidence.rejected} rejected"


def _text_lines(result: TextResult) -> list[str]:
    word = "passed" if result.passed else "FAILED"
    per_step = result.tokens / result.steps if result.steps else 0.0
    head = f"   {word}: {result.setting}: {result.texts} texts, {result.tokens} tokens, {per_step:.2f} a step"
    head += f"; {_counts(result.evidence)}"
    ties = [
        f"     prompt {each.prompt}, token {each.place}: {each.plain_token} or {each.guessed_token}, margin "
        f"{each.margin:.2e}, near-tie below {each.bound:.2e}"
        for each in result.differences
    ]
    return [f"{head}, {len(ties)} differences", *ties]
