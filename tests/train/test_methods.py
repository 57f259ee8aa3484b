"""What is trained is what is served, and training makes it better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import TargetWeights, read_head
from foretell.models.draft_heads.layer import init_weights
from foretell.train.batches import Batches
from foretell.train.block import BlockMethod
from foretell.train.capture import Capture, KeptStates
from foretell.train.checkpoint import FILE, TrainingState
from foretell.train.dense_forward import CausalAttend, make_tables, run_dense
from foretell.train.distill import DistillMethod
from foretell.train.eagle import EagleMethod, TestAttend
from foretell.train.medusa import MedusaMethod
from foretell.train.objective import Method
from foretell.train.optimizer import Optimizer
from foretell.train.trainer import Limits, Trainer, estimate
from tests.tiny import CONFIG

from .toys import CONTEXT, CPU, capture_for, head_for, target, texts

KINDS = ("eagle", "block", "medusa", "distill")


def method_for(kind: str, model: Decoder, **settings: object) -> tuple[Method, Capture]:
    head: Any = head_for(kind, model, **settings)
    capture = capture_for(head, model)
    if kind == "distill":
        init_weights(head.layers, torch.Generator().manual_seed(0), spread=0.4)  # nor would it have to learn the rule
    made: dict[str, Any] = {
        "eagle": lambda: EagleMethod(head, capture, 4),
        "block": lambda: BlockMethod(head, capture),
        "medusa": lambda: MedusaMethod(head, capture),
        "distill": lambda: DistillMethod(head, capture, 4),
    }
    return made[kind](), capture


def trained(kind: str, steps: int, folder: Path, dtype: torch.dtype = torch.float32, evened: bool = False) -> Trainer:
    method, capture = method_for(kind, target().to(dtype))
    batches = Batches(texts(), 512, 0, CPU)
    optimizer = Optimizer(method.trained(), 3e-2 if evened else 1e-2, 5, 1.0, evened)
    trainer = Trainer(method, capture, batches, optimizer, Limits(steps, None), folder, TrainingState())
    trainer.run(lambda: None, lambda shown: None)
    return trainer


def test_whole_texts_at_once_give_the_states_of_the_runner() -> None:
    from foretell.kernels.attention import AttentionLayout, Span, group_spans
    from foretell.models.decoder import ForwardBatch

    model = target()
    tokens = torch.tensor(texts()[0].tokens)
    tables = make_tables(model, CONTEXT)
    attend = CausalAttend(model.config.scale, model.config.windows)
    places = torch.arange(len(tokens))
    dense, tapped = run_dense(model, tables, tokens[None], places, attend, (0, 1, 2))
    model.tables = tables
    cache = KVCache(model.layer_shapes, 16, 4, model.dtype, CPU)
    layout = AttentionLayout(4, CONFIG.heads // CONFIG.kv_heads, frozenset(CONFIG.windows), model.dtype)
    groups = group_spans([Span(0, len(tokens), 0, tuple(range(10)))], layout)
    paged, theirs = model(ForwardBatch(tokens, places, places, groups), cache, (0, 1, 2))
    torch.testing.assert_close(dense[0], paged, rtol=1e-4, atol=1e-4)
    for mine, other in zip(tapped, theirs, strict=True):
        torch.testing.assert_close(mine[0], other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("evened", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_makes_guesses_stand(kind: str, evened: bool, tmp_path: Path) -> None:
    method, capture = method_for(kind, target())
    apart = Batches(texts(seed=1, count=6), 512, 0, CPU)
    before, _ = estimate(method, capture, apart, 0)
    trainer = trained(kind, 120 if kind == "medusa" else 60, tmp_path, evened=evened)
    after, accuracy = estimate(trainer.method, trainer.capture, apart, 0)
    assert after > before + 0.5
    assert all(0 <= share <= 1 for share in accuracy)


@pytest.mark.parametrize("evened", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_in_half_precision_masters_keep_what_is_learnt(kind: str, evened: bool, tmp_path: Path) -> None:
    trainer = trained(kind, 8, tmp_path, torch.bfloat16, evened)
    assert trainer.optimizer.twins
    for master, each in zip(trainer.optimizer.masters, trainer.optimizer.parameters, strict=True):
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), each)
    (tmp_path / "again").mkdir()
    again = trained(kind, 2, tmp_path / "again", torch.bfloat16, evened)
    again.load(load_file(tmp_path / FILE))
    assert all(map(torch.equal, again.optimizer.masters, trainer.optimizer.masters))
    mine, theirs = again.optimizer.state(), trainer.optimizer.state()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_says_what_was_trained(kind: str, tmp_path: Path) -> None:
    trainer = trained(kind, 4, tmp_path)
    trainer.method.write(tmp_path / "head", (0.5, 0.25))
    model = target()
    head = read_head(tmp_path / "head")
    head.share_weights(TargetWeights.of(model))
    head.prepare(CONTEXT + 16)
    assert head.config.accuracy == (0.5, 0.25)
    mine: Any = trainer.method
    for name, tensor in mine.head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], tensor)


def test_a_test_step_is_a_chain_over_what_was_read() -> None:
    """Step s of training, at one place, against a chain written out: keys of the text, then its own."""
    model = target()
    head: Any = head_for("eagle", model)
    capture = capture_for(head, model)
    batch = Batches(texts(count=1), 512, 0, CPU).in_order()[0]
    states = capture(batch)
    tokens, fused = batch.tokens, head.fuse(states.features)
    length = tokens.shape[1]
    places, attend = torch.arange(1, length), TestAttend(head.config.layer.scale, None)
    column = 18
    said = [head.step(tokens[:, 1:], fused[:, :-1], head.rope_rows(places), attend)[:, column]]
    narrow = torch.tensor([[15, column, 21]])  # of the later steps only some columns are run
    attend.narrow(narrow)
    feature = head.carry(
        head.step(tokens[:, 1:], fused[:, :-1], head.rope_rows(places), TestAttend(attend.scale, None))
    )
    feature = feature[:, narrow[0]]
    for step in (1, 2):
        run = head.step(tokens[:, narrow[0] + 1 + step], feature, head.rope_rows(narrow + 1 + step), attend)
        said.append(run[:, 1])
        feature = head.carry(run)
    chain = Chain(head.config.layer.scale)
    own = head.step(tokens[:, 1 : column + 2], fused[:, : column + 1], head.rope_rows(places[: column + 1]), chain)[
        :, -1:
    ]
    for step in range(3):
        torch.testing.assert_close(own[0, 0], said[step][0], rtol=1e-4, atol=1e-5)
        place = column + 1 + step + 1
        own = head.step(tokens[:, place, None], head.carry(own), head.rope_rows(torch.tensor([place])), chain)


class Chain:
    """Attention as it is served: new rows see all that came before, and are kept."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.kept.append((k, v))
        keys, values = torch.cat([k for k, _ in self.kept], 1), torch.cat([v for _, v in self.kept], 1)
        rows, total = q.shape[1], keys.shape[1]
        seen = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, seen, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)


def test_a_block_sees_what_lies_before_its_anchor_alone() -> None:
    """A block among many, against the same block by itself over a text cut before its anchor."""
    from foretell.train.block import BlockAttend

    model = target()
    head: Any = head_for("block", model)
    batch = Batches(texts(count=1), 512, 0, CPU).in_order()[0]
    states = capture_for(head, model)(batch)
    anchors = torch.tensor([[7, 20, 25]])
    many = block_states(head, batch.tokens, states.features, anchors)
    alone = block_states(head, batch.tokens, states.features, anchors[:, 1:2], cut=20)
    torch.testing.assert_close(many[:, 1], alone[:, 0], rtol=1e-4, atol=1e-5)
    assert BlockAttend is not None


def block_states(head: Any, tokens: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, cut: int = 99) -> Any:
    from foretell.train.block import BlockAttend

    features = head.with_token_hints(features[:, :cut], tokens[:, :cut])
    read = head.context_kv(head.fuse(features), head.rope_rows(torch.arange(features.shape[1])))
    places = anchors[..., None] + torch.arange(head.config.block)
    attend = BlockAttend(head.config.layer.scale, head.config.causal_in_block, read, anchors)
    return head(tokens.gather(1, anchors), head.rope_rows(places), attend)


def test_states_that_are_kept_are_those_of_their_step() -> None:
    model = target()
    head = head_for("eagle", model)
    batches = Batches(texts(), 96, 0, CPU)
    assert batches.an_epoch > 3
    fresh, kept = capture_for(head, model), KeptStates(capture_for(head, model), batches)
    kept._room = 3 * fresh(batches.at(0)).nbytes  # some are, some are not
    for step in range(2 * batches.an_epoch):
        found, truth = kept.at(step), fresh(batches.at(step))
        assert torch.equal(found.batch.tokens, truth.batch.tokens) and torch.equal(found.features, truth.features)
    assert 0 < len(kept._kept) < batches.an_epoch
    assert sorted(map(batches.number, range(batches.an_epoch))) == list(range(batches.an_epoch))
