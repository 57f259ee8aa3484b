"""The certificate: four parts and one verdict."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from foretell.engine.rule_verifier import rule_for
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.options import nearest
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, VerifyResult
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import LOSSLESS, LOSSY, Rule

from .distribution_test import (
    FALSE_ALARM,
    FULL_RUN_DISTANCE,
    NUM_SETTINGS,
    POWER,
    QUICK_SAMPLES,
    SETTINGS,
    TREE,
    DistributionResult,
    DraftCheckResult,
    check_distribution,
    check_draft_sampling,
    detectable_distance,
    samples_needed,
    sampling_drafter,
    tiny_engine,
)
from .evidence import Evidence, missing_evidence
from .exact import ExactResult, check_exact, drift
from .known_bugs import KNOWN_BUGS, KnownBug, uniforms_for, with_all_distributions
from .text_equality import PROMPTS, TextResult, check_outputs, encode

KNOWN_BUG_SAMPLES = 4_000  # outputs per planted bug and setting
Log = Callable[[str], None]
Conclusion = Literal["lossless", "not lossless", "inconclusive"]
CustomRule = Callable[[Draft, Any, list[float]], VerifyResult]


@dataclass(frozen=True)
class CertifyJob:
    """A rule to certify, and the prompts of part 3."""

    rule: str = "match"
    plant: str | None = None  # name of a known bug to plant
    quick: bool = False
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: int = 48
    ignore_eos: bool = False  # generate `max_tokens` for every prompt

    def __post_init__(self) -> None:
        known = [*LOSSLESS, *LOSSY, "module:function"]
        if ":" not in self.rule and self.rule not in known:
            raise RequestError("rule", f"{self.rule!r} cannot be certified; {nearest(self.rule, known)}")
        if self.max_tokens < 1:
            raise RequestError("max_tokens", f"must be 1 or more, not {self.max_tokens}")
        if self.plant is not None and self.is_custom:
            raise RequestError("plant", "replaces a built-in rule; leave out --rule")
        if self.plant is not None and self.plant not in KNOWN_BUGS:
            raise RequestError("plant", f"{self.plant!r} is not known; {nearest(self.plant, KNOWN_BUGS)}")

    @property
    def is_custom(self) -> bool:
        """Return whether the rule is a function of the user, named as module:function."""
        return ":" in self.rule

    @property
    def needs_model(self) -> bool:
        """Return whether part 3 runs: a lossy rule and a planted bug are decided before it."""
        return self.rule not in LOSSY and self.plant is None

    @property
    def num_settings(self) -> int:
        """Return the sampling settings of part 3: greedy, and a seed under `match`, which alone keeps its tokens."""
        return 2 if self.request_rule == "match" else 1

    @property
    def request_rule(self) -> str:
        """Return the rule that requests name; a custom rule and a planted bug replace `rejection`."""
        return "rejection" if self.is_custom or self.plant else self.rule


@dataclass
class Certificate:
    """The results of all parts of a certification, and its verdict."""

    job: CertifyJob
    exact: list[ExactResult] = field(default_factory=list)
    distribution: list[DistributionResult] = field(default_factory=list)
    outputs: list[TextResult] = field(default_factory=list)
    draft_checks: list[DraftCheckResult] = field(default_factory=list)
    caught: dict[str, bool] = field(default_factory=dict)  # by known bug
    rule_error: str | None = None  # exception of a custom rule
    drift: float | None = None  # mean total variation per step of a lossy rule

    @property
    def verdict(self) -> Conclusion:
        passed = [each.passed for each in self.exact] + [each.passed for each in self.distribution]
        passed += [each.passed for each in self.outputs] + [each.passed for each in self.draft_checks]
        if self.rule_error is not None or self.drift is not None or not all(passed) or not all(self.caught.values()):
            return "not lossless"
        return "inconclusive" if self.reasons else "lossless"

    @property
    def lossless(self) -> bool | None:
        """Return True or False as found, None for inconclusive."""
        return {"lossless": True, "not lossless": False, "inconclusive": None}[self.verdict]

    @property
    def reasons(self) -> list[str]:
        """Return why the run is inconclusive, one line each; empty where all parts have enough evidence."""
        reasons = missing_evidence("part 2", [each.evidence for each in self.distribution])
        reasons += missing_evidence("part 3", [each.evidence for each in self.outputs])
        for each in self.draft_checks:
            reasons += each.missing_evidence
        for result in self.outputs:
            if len(result.differences) > result.max_near_ties:
                count = f"{len(result.differences)} of {result.sequences} sequences differ at near-ties"
                reasons.append(
                    f"part 3, {result.setting}: {count}; "
                    f"plain decoding in a batch gives {result.control}, which explains at most {result.max_near_ties}"
                )
        return reasons if self.distribution and self.outputs else [*reasons, "not all parts were run"]

    @property
    def near_ties(self) -> int:
        return sum(len(result.differences) for result in self.outputs)

    def as_json(self) -> dict[str, Any]:
        return {
            "lossless": self.lossless,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "rule": self.job.request_rule if self.job.plant else self.job.rule,
            "plant": self.job.plant,
            "quick": self.job.quick,
            "exact": [asdict(each) | {"passed": each.passed} for each in self.exact],
            "draws": [each.as_json() for each in self.distribution],
            "texts": [each.as_json() for each in self.outputs],
            "guesses": [each.as_json() for each in self.draft_checks],
            "near_ties": self.near_ties,
            "planted_bugs_caught": self.caught,
            "false_alarm": FALSE_ALARM,
            "power": POWER,
            "broken": self.rule_error,
            "drift": self.drift,
        }


def certify(job: CertifyJob, load: Callable[[], LLM], log: Log) -> Certificate:
    """Run all parts that apply. `load` returns the model and drafter to certify and is called for part 3 only."""
    certificate = Certificate(job)
    if job.rule in LOSSY:
        certificate.drift = drift(job.rule)
        log(f"{job.rule} is lossy by design: mean total variation {certificate.drift:.3f} per step in toy languages")
        return certificate
    built_in = not job.is_custom and job.plant is None
    if built_in:
        log(f"1. exact enumeration: all outcomes of the rule {job.rule} over small vocabularies")
        certificate.exact.append(check_exact(job.rule, job.quick))
        log(_exact_line(certificate.exact[-1]))
    _check_distribution(certificate, log)
    if certificate.rule_error is None and job.needs_model:
        _check_outputs(certificate, load, log)
    if built_in:
        _check_known_bugs(certificate, log)
    return certificate


def _check_distribution(certificate: Certificate, log: Log) -> None:
    job = certificate.job
    samples = QUICK_SAMPLES if job.quick else samples_needed(FULL_RUN_DISTANCE, NUM_SETTINGS)
    distance = detectable_distance(samples, NUM_SETTINGS)
    log(
        f"2. distribution test: {samples} outputs per setting through the engine, detects a total variation of "
        f"{distance:.3f} with {POWER:.0%} power"
    )
    bug = KNOWN_BUGS.get(job.plant or "", KnownBug())
    rules = _rules(job, bug)
    for setting in SETTINGS if job.is_custom or job.plant else (*SETTINGS, TREE):
        engine = tiny_engine(bug.drafter(setting.drafter()), rules, setting.draft_length)
        try:
            certificate.distribution.append(check_distribution(engine, job.request_rule, setting, samples))
        except Exception as error:
            _record_rule_error(certificate, error, log)
            return
        log(_distribution_line(certificate.distribution[-1]))
        if job.plant is not None and not certificate.distribution[-1].passed:
            return  # the bug is caught: more samples would only cost time


def _record_rule_error(certificate: Certificate, error: Exception, log: Log) -> None:
    """Record the exception of a custom rule as the finding; with a built-in rule it is a bug of ours and is raised."""
    if not certificate.job.is_custom:
        raise error
    certificate.rule_error = f"{type(error).__name__}: {error}"
    log(f"   the rule failed: {certificate.rule_error}")


def _check_outputs(certificate: Certificate, load: Callable[[], LLM], log: Log) -> None:
    job = certificate.job
    llm = load()
    if job.is_custom:
        llm.engine.verifier.rule_verifier.rules = _rules(job, KnownBug())
    log(f"3. output equality: {len(job.prompts)} prompts, speculation on and off, drafter {llm.engine.drafter.name}")
    settings = [SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)]
    if job.num_settings > 1:
        settings.append(replace(settings[0], temperature=0.8, top_p=0.95, seed=17))
    for params in settings:
        try:
            certificate.outputs.append(check_outputs(llm, list(job.prompts), params, job.request_rule))
        except Exception as error:
            _record_rule_error(certificate, error, log)
            return
        for line in _output_lines(certificate.outputs[-1]):
            log(line)
    if llm.engine.drafter.traits.samples and job.request_rule != "match":  # `match` does not use draft distributions
        prompts = [encode(llm.tokenizer, prompt) for prompt in job.prompts]
        certificate.draft_checks.append(check_draft_sampling(llm, prompts, job.request_rule, job.max_tokens))
        log(_draft_check_line(certificate.draft_checks[-1]))


def _check_known_bugs(certificate: Certificate, log: Log) -> None:
    log("4. known bugs: part 2 with each of them planted")
    for name, bug in KNOWN_BUGS.items():
        job = CertifyJob(rule="rejection", plant=name)
        certificate.caught[name] = any(_catches(bug, job, i) for i in (1, 2))
        log(f"   {name}: {'caught' if certificate.caught[name] else 'NOT CAUGHT'}")


def _catches(bug: KnownBug, job: CertifyJob, setting: int) -> bool:
    chosen = SETTINGS[setting]
    engine = tiny_engine(bug.drafter(sampling_drafter()), _rules(job, bug), chosen.draft_length)
    return not check_distribution(engine, "rejection", chosen, KNOWN_BUG_SAMPLES).passed


def _rules(job: CertifyJob, bug: KnownBug) -> Callable[[Request], Rule]:
    """Return what gives a request its rule: the custom one, the one with the bug, or the built-in one."""
    if job.is_custom:
        custom = _wrap(load_custom_rule(job.rule))
        return lambda request: custom
    if bug.rule is not None:
        buggy = bug.rule
        return lambda request: buggy
    return rule_for


def load_custom_rule(name: str) -> CustomRule:
    """Import the function that a user names as module:function."""
    module, _, function = name.partition(":")
    try:
        found: CustomRule = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise RequestError("rule", f"{name!r} cannot be imported ({error}); name it as module:function") from None
    if not callable(found):
        raise RequestError("rule", f"{name!r} is not a function")
    return found


def _wrap(custom: CustomRule) -> Rule:
    """Adapt a custom rule to the engine's interface and check each of its results."""

    def rule(draft: Draft, probs: Any, random: RandomSource, /) -> VerifyResult:
        result = custom(with_all_distributions(draft, probs), probs, uniforms_for(draft, random))
        _check_result(result, draft, probs.shape[-1])
        return result

    return rule


def _check_result(result: VerifyResult, draft: Draft, vocab: int) -> None:
    parent = -1
    for node in result.accepted_path:
        if not 0 <= node < len(draft) or draft.parents[node] != parent:
            raise ValueError(f"path {result.accepted_path} does not follow the draft")
        parent = node
    if not 0 <= result.next_token < vocab:
        raise ValueError(f"next_token {result.next_token} is outside the vocabulary")


def _draft_check_line(result: DraftCheckResult) -> str:
    word = "passed" if result.passed else "FAILED"
    tested = f"{result.num_tokens} draft tokens follow the distribution their drafter states"
    return f"   {word}: {tested}: p = {result.p_value:.3g}"


def _exact_line(result: ExactResult) -> str:
    word = "passed" if result.passed else "FAILED"
    return f"   {word}: {result.cases} cases, largest total variation {result.worst:.1e} ({result.worst_case})"


def _distribution_line(result: DistributionResult) -> str:
    word = "passed" if result.passed else "FAILED"
    return f"   {word}: {result.setting}: p = {result.p_value:.3g}; {_counts(result.evidence)}"


def _counts(evidence: Evidence) -> str:
    return f"{evidence.drafted} drafted, {evidence.accepted} accepted, {evidence.rejected} rejected"


def _output_lines(result: TextResult) -> list[str]:
    word = "passed" if result.passed else "FAILED"
    per_step = result.tokens / result.steps if result.steps else 0.0
    summary = f"   {word}: {result.setting}: {result.sequences} sequences, {result.tokens} tokens, "
    summary += f"{per_step:.2f} tokens per step; {_counts(result.evidence)}, {len(result.differences)} differences"
    differences = [
        f"     prompt {each.prompt}, token {each.position}: {each.plain_token} or {each.speculative_token}, margin "
        f"{each.margin:.2e}, near-tie below {each.bound:.2e}"
        for each in result.differences
    ]
    return [summary, *differences]
