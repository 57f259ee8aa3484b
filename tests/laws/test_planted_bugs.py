"""The laws can fail: each bug planted here is caught by one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.engine import rule_verifier, verifier
from foretell.engine.rule_verifier import VerifyCase
from foretell.kernels.attention import Span
from foretell.kv.pages import PagePool
from foretell.kv.prefix import PrefixIndex
from foretell.runner import batch_layout
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.sampling import SamplingRow
from foretell.types import Draft, Sequence, VerifyResult
from tests.tiny import PROMPTS, VOCAB, World, add, generate, random_tree, run, tree_around

Plant = Callable[[pytest.MonkeyPatch], None]


def branch_not_compacted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelRunner, "compact_kv", lambda self, seq, root, path: None)


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_layout, "Span", lambda first, rows, start, pages, parents: Span(first, rows, start, pages))


def positions_by_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "depths", lambda self: list(range(1, len(self) + 1)))


def noise_by_row(patch: pytest.MonkeyPatch) -> None:
    def rows(case: VerifyCase) -> list[SamplingRow]:
        return [SamplingRow(case.request.params, case.request.seed, row) for row in range(len(case.draft) + 1)]

    patch.setattr(VerifyCase, "rows", rows)


def pages_leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelRunner, "trim", lambda self, seq, tokens: seq.pages.__delitem__(slice(-1, None)))


def cached_one_too_far(patch: pytest.MonkeyPatch) -> None:
    keep = ModelRunner.compact_kv

    def too_far(self: ModelRunner, seq: Sequence, root: int, path: tuple[int, ...]) -> None:
        keep(self, seq, root, tuple(node - 1 if node else node for node in path))

    patch.setattr(ModelRunner, "compact_kv", too_far)


def accepts_without_verifying(patch: pytest.MonkeyPatch) -> None:
    def accept_first(draft: Draft, target_tokens: tuple[int, ...]) -> VerifyResult:
        return VerifyResult((0,), target_tokens[1]) if len(draft) else VerifyResult((), target_tokens[0])

    for module in (verifier, rule_verifier):
        patch.setattr(module, "verify_match", accept_first)


def page_shared_while_written(patch: pytest.MonkeyPatch) -> None:
    allocate = PagePool._allocate_one
    patch.setattr(PagePool, "_allocate_one", lambda self: allocate(self) if len(self._free) % 3 else self._free[0])


def prefix_ignores_what_precedes(patch: pytest.MonkeyPatch) -> None:
    add = PrefixIndex._add

    def forgetful(self: PrefixIndex, key: tuple[int | str, tuple[int, ...]], page: int) -> object:
        self._serial = 0
        return add(self, key, page)

    patch.setattr(PrefixIndex, "_add", forgetful)


def slots_off_by_one_page(patch: pytest.MonkeyPatch) -> None:
    slots_of = batch_layout.slots_of

    def wrong(pages: tuple[int, ...], size: int, start: int, stop: int) -> list[int]:
        return slots_of((*pages[:-1], pages[0]), size, start, stop)

    patch.setattr(batch_layout, "slots_of", wrong)


BUGS: list[Plant] = [
    branch_not_compacted,
    siblings_see_each_other,
    positions_by_node,
    noise_by_row,
    pages_leak,
    cached_one_too_far,
    accepts_without_verifying,
    page_shared_while_written,
    prefix_ignores_what_precedes,
    slots_off_by_one_page,
]
X, Y, Z, W = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]
REPEATED = [X + Y + Z + [9], X + W + [9], X + W + Z + [9]]  # the last one's Z follows another page than the first one's


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    return generate(temperature=1.0)


def the_laws(truth: list[list[int]]) -> None:
    outputs = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, truth, strict=True)}
    for drafter in (
        NGramDrafter(1, 3),
        OracleDrafter(outputs, VOCAB, 0.3),
        ScriptedDrafter(random_tree),
        tree_around(truth),
    ):
        assert generate(drafter, World(pages=12), temperature=1.0) == truth
    cold = generate(NGramDrafter(1, 3), World(prefix_cache=False, max_num_seqs=1), prompts=REPEATED)
    assert generate(NGramDrafter(1, 3), World(max_num_seqs=1), prompts=REPEATED) == cold


def test_the_laws_hold_where_nothing_is_planted(truth: list[list[int]]) -> None:
    the_laws(truth)


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(plant: Plant, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError)), torch.inference_mode():
        the_laws(truth)


def test_a_small_cache_really_preempts() -> None:
    engine = World(page_size=4, pages=12, max_num_seqs=5).engine()
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt, temperature=1.0)
    run(engine)
    assert engine.scheduler.preemptions > 0
