"""The native executor returns what the eager one returns, and is batch-invariant."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.build.model_source import describe_executor
from foretell.config import EngineConfig
from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.kernels.native.library import library
from foretell.kernels.native.records import StepRecord
from foretell.models.config import ModelConfig, Rope
from foretell.models.decoder import first_layers
from foretell.models.fast_paths import missing_fast_path
from foretell.models.hf_config import from_hf
from foretell.models.quantize import quantized_copy
from foretell.runner.executor import EagerExecutor
from foretell.runner.native.executor import NativeExecutor
from foretell.types import Draft, ScheduledSequence
from tests.models import families
from tests.tiny import World, generate, tree_around

from .harness import CONTEXT, RunnerHarness, random_model, text

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler is here")

PLAIN = ModelConfig(vocab=70, width=40, layers=2, heads=6, kv_heads=2, head_dim=20, ffn=50, context=CONTEXT)
WINDOWED = replace(
    PLAIN,
    windows=(9, None),
    ropes=(Rope(), Rope(theta=500.0)),
    qk_norm=True,
    sandwich_norms=True,
    activation="gelu_tanh",
    embed_scale=3.0,
)
WIDE = replace(PLAIN, width=64, heads=4, kv_heads=1, head_dim=64, ffn=96, vocab=200, qkv_bias=True, tied=False)
LARGE = replace(PLAIN, width=576, ffn=1536, heads=9, kv_heads=3, head_dim=64)  # large enough to be split over threads
POST_NORMED = replace(
    PLAIN,
    qk_norm=True,
    full_qk_norm=True,
    pre_norms=False,
    sandwich_norms=True,
    residual_scale=0.4,
    ropes=(Rope(original_context=16, query_growth=0.3), Rope(kind="none")),
)
CONFIGS = {"plain": PLAIN, "windowed": WINDOWED, "wide": WIDE, "post-normed": POST_NORMED}
BITS = [None, 8, 4]


def harness(config: ModelConfig, bits: int | None = None, page_size: int = 4) -> RunnerHarness:
    model = random_model(config)
    made = RunnerHarness(model if bits is None else quantized_copy(model, 8 if bits == 8 else 4), page_size)
    assert isinstance(made.runner.executor, NativeExecutor)
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_step_that_does_not_fit_in_memory_is_an_error_and_the_next_one_runs() -> None:
    native, executor = library(), harness(PLAIN).runner.executor
    assert native is not None and isinstance(executor, NativeExecutor)
    with pytest.raises(MemoryError, match="max_num_batched_tokens"):
        native.forward(executor._record, array("q", bytes(StepRecord(rows=1 << 50))))
    assert harness(PLAIN).read(text(9, PLAIN.vocab)).isfinite().all()


def gap(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def family_config(name: str) -> ModelConfig:
    return from_hf(families.MODELS[name][1].to_dict())


def random_tree(rng: random.Random, nodes: int, vocab: int) -> Draft:
    tokens = tuple(rng.randrange(vocab) for _ in range(nodes))
    return Draft(tokens, tuple(rng.randrange(-1, i) for i in range(nodes)))


@pytest.mark.parametrize("name", [name for name in families.MODELS if not name.startswith(("gemma2", "gemma4"))])
def test_every_model_family_equals_the_reference(name: str) -> None:
    config, rng = family_config(name), random.Random(name)
    native, eager = harness(config), RunnerHarness(random_model(config)).eager()
    tree, chain = random_tree(rng, 9, config.vocab), Draft.chain(text(5, config.vocab))
    steps = [[(70, Draft()), (3, Draft())], [(1, tree), (40, chain)], [(1, Draft()), (1, tree)], [(2, tree), (1, tree)]]
    seqs = [[made.open(text(90, config.vocab, seed)) for seed in (1, 2)] for made in (native, eager)]
    for step in steps:
        parts = [[(seq, take, draft) for seq, (take, draft) in zip(mine, step, strict=True)] for mine in seqs]
        for ours, theirs in zip(native.run(*parts[0]), eager.run(*parts[1]), strict=True):
            assert gap(ours, theirs) < 2e-5


def test_a_model_without_a_fast_path_runs_in_torch() -> None:
    config = family_config("gemma2")
    source = SimpleNamespace(config=config, device=torch.device("cpu"))
    line = describe_executor(EngineConfig(model="m"), source, CONTEXT)  # type: ignore[arg-type]
    assert line == "m: runs in torch, which is slower: no native kernel for softcapping of attention scores"
    source.config = PLAIN
    assert not describe_executor(EngineConfig(model="m"), source, CONTEXT)  # type: ignore[arg-type]
    assert missing_fast_path(config, "cpu", CONTEXT) == "softcapping of attention scores"
    assert isinstance(RunnerHarness(random_model(config)).runner.executor, EagerExecutor)
    assert missing_fast_path(family_config("gemma4"), "cpu", CONTEXT) == "layers of different sizes"
    assert all(missing_fast_path(each, "cuda", CONTEXT) is None for each in (PLAIN, WINDOWED, WIDE))
    assert missing_fast_path(POST_NORMED, "cpu", CONTEXT) is None


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_models_equal_the_reference(bits: int) -> None:
    for config in CONFIGS.values():
        tokens = text(60, config.vocab)
        native = harness(config, bits).read(tokens)
        assert gap(native, harness(config, bits).eager().read(tokens)) < 0.02, (
            "a quantization step of a row, now and then"
        )


def test_hidden_states_are_those_of_the_requested_layers() -> None:
    for taps in ((2,), (0, 1), (2, 0, 2)):
        native, eager = (
            RunnerHarness(random_model(WINDOWED), taps=taps),
            RunnerHarness(random_model(WINDOWED), taps=taps).eager(),
        )
        found = [
            made.runner.forward(*_shares(made, text(20, WINDOWED.vocab))).hidden_states for made in (native, eager)
        ]
        assert found[0] is not None and found[1] is not None
        assert found[0].shape == (20, len(taps) * WINDOWED.width) and gap(found[0], found[1]) < 2e-5


def _shares(made: RunnerHarness, tokens: list[int]) -> tuple[list[ScheduledSequence], list[Draft]]:
    return [ScheduledSequence.of(made.open(tokens), len(tokens))], [Draft()]


@pytest.fixture(params=[0, 1, 2])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return each instruction set of this processor."""
    native = library()
    if native is None or request.param > native.best_level:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(native, "best_level", request.param)
    return int(request.param)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_row_has_the_same_bits_in_any_prefill_chunks(config: ModelConfig, bits: int | None, level: int) -> None:
    made, tokens = harness(config, bits), text(100, config.vocab)
    alone = made.read(tokens, piece=1)
    assert all(same_bits(made.read(tokens, piece), alone) for piece in (None, 2, 7, 33, 64))
    for page_size in (1, 16, 5):
        assert same_bits(harness(config, bits, page_size).read(tokens), alone)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_row_has_the_same_bits_in_any_batch(config: ModelConfig, bits: int | None, level: int) -> None:
    made, rng = harness(config, bits), random.Random(0)
    texts = [text(length, config.vocab, length) for length in (90, 75, 60, 41)]
    alone = [made.read(tokens, piece=1) for tokens in texts]
    seqs = [made.open(tokens) for tokens in texts]
    while waiting := [seq for seq in seqs if seq.pending]:
        some = rng.sample(waiting, rng.randint(1, len(waiting)))
        takes = [min(rng.choice((1, 1, 2, 5, 30)), seq.pending) for seq in some]
        trees = [random_tree(rng, rng.randrange(4), config.vocab) for _ in some]
        starts = [seq.num_computed_tokens for seq in some]
        found = made.run(*zip(some, takes, trees, strict=True))
        for seq, start, take, rows in zip(some, starts, takes, found, strict=True):
            assert same_bits(rows[:take], alone[seqs.index(seq)][start : start + take])


def around(tokens: list[int], vocab: int) -> Draft:
    """Return a tree in which each right token follows a wrong sibling and has a branch of its own."""
    drafted: list[int] = []
    parents: list[int] = []
    for token in tokens:
        parents += [len(drafted) - 1] * 2
        drafted += [(token + 1) % vocab, token]
    return Draft(tuple(drafted), tuple(parents))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("start", [1, 25, 31, 32, 60])
def test_a_tree_node_has_the_bits_of_plain_decoding(
    config: ModelConfig, bits: int | None, start: int, level: int
) -> None:
    made, tokens = harness(config, bits), text(90, config.vocab)
    alone, guessed = made.read(tokens, piece=1), tokens[start : start + 9]
    for draft, path in ((Draft.chain(guessed), range(9)), (around(guessed, config.vocab), range(1, 18, 2))):
        seq = made.open(tokens)
        (rows,) = made.run((seq, start, draft))
        nodes = rows[start:]
        assert same_bits(nodes[list(path)], alone[start : start + 9])
        made.runner.compact_kv(seq, start - 1, tuple(path))
        seq.num_computed_tokens += 9
        assert same_bits(made.run((seq, 1, Draft()))[0], alone[start + 9 : start + 10]), "after KV compaction"
        made.close(seq)


def test_the_number_of_threads_changes_no_bit() -> None:
    made, tokens = harness(LARGE), text(100, PLAIN.vocab)
    alone = made.read(tokens)
    for threads in (2, 3, 5, 8):
        torch.set_num_threads(threads)
        try:
            assert all(same_bits(made.read(tokens, piece), alone) for piece in (None, 1, 9))
        finally:
            torch.set_num_threads(1)


def test_engines_in_several_threads_do_not_disturb_each_other() -> None:
    harnesses, tokens = [harness(LARGE) for _ in range(3)], text(60, PLAIN.vocab)
    alone = harnesses[0].read(tokens)
    found: list[bool] = []

    def read(made: RunnerHarness) -> None:
        found.extend(same_bits(made.read(tokens, piece), alone) for piece in (None, 1, 8))

    torch.set_num_threads(2)
    try:
        readers = [threading.Thread(target=read, args=(made,)) for made in harnesses]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        torch.set_num_threads(1)
    assert found == [True] * 9


def test_an_early_exit_runs_natively_over_the_same_weights() -> None:
    made = harness(PLAIN)
    early = made.runner.with_variant(first_layers(made.runner.model, 1))
    assert isinstance(early.executor, NativeExecutor)
    eager = RunnerHarness(first_layers(random_model(PLAIN), 1)).eager()
    tokens = text(30, PLAIN.vocab)
    found = early.forward(*_shares(made, tokens)).logits
    assert gap(found, eager.runner.forward(*_shares(eager, tokens)).logits) < 2e-5


def test_unsupported_models_use_the_eager_executor() -> None:
    for model in (random_model(PLAIN).to(torch.bfloat16), random_model(replace(PLAIN, head_dim=7))):
        assert not isinstance(RunnerHarness(model).runner.executor, NativeExecutor)


@pytest.mark.parametrize("drafter", [tree_around, lambda truth: NGramDrafter(1, 3)], ids=["tree", "ngram"])
def test_the_eager_executor_is_lossless_too(drafter: Callable[[Any], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    """The law tests use the native executor if there is a compiler; this is the other one."""
    monkeypatch.setattr("foretell.runner.model_runner.native_executor", lambda model, cache: None)
    truth = generate(None, World(max_num_seqs=1), temperature=1.0)
    assert isinstance(World().engine().runner.executor, EagerExecutor)
    assert generate(drafter(truth), temperature=1.0) == truth
