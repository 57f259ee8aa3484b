"""Training objectives: the trained head is the served head, and training raises acceptance."""

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
from foretell.train.block import BlockObjective
from foretell.train.capture import HiddenStateCache, HiddenStateCapture
from foretell.train.dense_forward import CausalAttention, dense_forward, rope_tables
from foretell.train.eagle import EagleObjective, TrainingTimeTestAttention
from foretell.train.medusa import MedusaObjective
from foretell.train.objective import DistillObjective, Objective
from foretell.train.optimizer import Optimizer
from foretell.train.token_dataset import BatchLoader
from foretell.train.trainer import CHECKPOINT_FILE, Trainer, TrainingLimits, TrainingState, estimate_acceptance
from tests.tiny import CONFIG

from .toy_target import CONTEXT, CPU, capture_for, documents, head_for, target

KINDS = ("eagle", "block", "medusa", "distill")


def objective_for(kind: str, model: Decoder, **settings: object) -> tuple[Objective, HiddenStateCapture]:
    head: Any = head_for(kind, model, **settings)
    capture = capture_for(head, model)
    if kind == "distill":
        init_weights(head.layers, torch.Generator().manual_seed(0), spread=0.4)  # forget the rule
    made: dict[str, Any] = {
        "eagle": lambda: EagleObjective(head, capture, 4),
        "block": lambda: BlockObjective(head, capture),
        "medusa": lambda: MedusaObjective(head, capture),
        "distill": lambda: DistillObjective(head, capture, 4),
    }
    return made[kind](), capture


def trained(kind: str, steps: int, folder: Path, dtype: torch.dtype = torch.float32, muon: bool = False) -> Trainer:
    objective, capture = objective_for(kind, target().to(dtype))
    batches = BatchLoader(documents(), 512, 0, CPU)
    optimizer = Optimizer(objective.parameters(), 3e-2 if muon else 1e-2, 5, 1.0, muon)
    trainer = Trainer(objective, capture, batches, optimizer, TrainingLimits(steps, None), folder, TrainingState())
    trainer.run(lambda: None, lambda progress: None)
    return trainer


def test_dense_forward_gives_the_hidden_states_of_the_runner() -> None:
    from foretell.kernels.attention import AttentionLayout, Span, group_spans
    from foretell.models.decoder import ForwardBatch

    model = target()
    tokens = torch.tensor(documents()[0].tokens)
    rope = rope_tables(model, CONTEXT)
    attend = CausalAttention(model.config.scale, model.config.windows)
    positions = torch.arange(len(tokens))
    dense, layers = dense_forward(model, rope, tokens[None], positions, attend, (0, 1, 2))
    model.rope_tables = rope
    cache = KVCache(model.layer_shapes, 16, 4, model.dtype, CPU)
    layout = AttentionLayout(4, CONFIG.heads // CONFIG.kv_heads, frozenset(CONFIG.windows), model.dtype)
    groups = group_spans([Span(0, len(tokens), 0, tuple(range(10)))], layout)
    paged, theirs = model(ForwardBatch(tokens, positions, positions, groups), cache, (0, 1, 2))
    torch.testing.assert_close(dense[0], paged, rtol=1e-4, atol=1e-4)
    for mine, other in zip(layers, theirs, strict=True):
        torch.testing.assert_close(mine[0], other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_acceptance(kind: str, muon: bool, tmp_path: Path) -> None:
    objective, capture = objective_for(kind, target())
    held_out = BatchLoader(documents(seed=1, count=6), 512, 0, CPU)
    before, _ = estimate_acceptance(objective, capture, held_out, 0)
    trainer = trained(kind, 120 if kind == "medusa" else 60, tmp_path, muon=muon)
    after, accuracy = estimate_acceptance(trainer.objective, trainer.capture, held_out, 0)
    assert after > before + 0.5
    assert all(0 <= share <= 1 for share in accuracy)


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_training_keeps_float32_masters(kind: str, muon: bool, tmp_path: Path) -> None:
    trainer = trained(kind, 8, tmp_path, torch.bfloat16, muon)
    assert trainer.optimizer.has_masters
    for master, each in zip(trainer.optimizer.masters, trainer.optimizer.parameters, strict=True):
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), each)
    (tmp_path / "again").mkdir()
    again = trained(kind, 2, tmp_path / "again", torch.bfloat16, muon)
    again.load_checkpoint(load_file(tmp_path / CHECKPOINT_FILE))
    assert all(map(torch.equal, again.optimizer.masters, trainer.optimizer.masters))
    mine, theirs = again.optimizer.state(), trainer.optimizer.state()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_has_the_trained_weights(kind: str, tmp_path: Path) -> None:
    trainer = trained(kind, 4, tmp_path)
    trainer.objective.save(tmp_path / "head", (0.5, 0.25))
    model = target()
    head = read_head(tmp_path / "head")
    head.share_weights(TargetWeights.of(model))
    head.prepare(CONTEXT + 16)
    assert head.config.accuracy == (0.5, 0.25)
    mine: Any = trainer.objective
    for name, tensor in mine.head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], tensor)


def test_a_training_time_test_step_equals_a_served_chain() -> None:
    """Compare draft step s in training with a chain decoded over the KV of the document and of its own drafts."""
    model = target()
    head: Any = head_for("eagle", model)
    capture = capture_for(head, model)
    batch = BatchLoader(documents(count=1), 512, 0, CPU).eval_batches()[0]
    states = capture(batch)
    tokens, fused = batch.tokens, head.fuse(states.hidden_states)
    length = tokens.shape[1]
    positions, attend = torch.arange(1, length), TrainingTimeTestAttention(head.config.layer.scale, None)
    column = 18
    outputs = [head.step(tokens[:, 1:], fused[:, :-1], head.rope_rows(positions), attend)[:, column]]
    narrow = torch.tensor([[15, column, 21]])  # later steps run some columns only
    attend.set_columns(narrow)
    hidden = head.carry(
        head.step(
            tokens[:, 1:], fused[:, :-1], head.rope_rows(positions), TrainingTimeTestAttention(attend.scale, None)
        )
    )
    hidden = hidden[:, narrow[0]]
    for step in (1, 2):
        run = head.step(tokens[:, narrow[0] + 1 + step], hidden, head.rope_rows(narrow + 1 + step), attend)
        outputs.append(run[:, 1])
        hidden = head.carry(run)
    chain = Chain(head.config.layer.scale)
    own = head.step(tokens[:, 1 : column + 2], fused[:, : column + 1], head.rope_rows(positions[: column + 1]), chain)[
        :, -1:
    ]
    for step in range(3):
        torch.testing.assert_close(own[0, 0], outputs[step][0], rtol=1e-4, atol=1e-5)
        position = column + 1 + step + 1
        own = head.step(tokens[:, position, None], head.carry(own), head.rope_rows(torch.tensor([position])), chain)


class Chain:
    """Attention with a growing KV cache, as it is served."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.kv.append((k, v))
        keys, values = torch.cat([k for k, _ in self.kv], 1), torch.cat([v for _, v in self.kv], 1)
        rows, total = q.shape[1], keys.shape[1]
        seen = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, seen, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)


def test_a_block_attends_only_to_the_context_before_its_anchor() -> None:
    """Compare one of several blocks with the same block alone over a truncated document."""
    from foretell.train.block import BlockAttention

    model = target()
    head: Any = head_for("block", model)
    batch = BatchLoader(documents(count=1), 512, 0, CPU).eval_batches()[0]
    states = capture_for(head, model)(batch)
    anchors = torch.tensor([[7, 20, 25]])
    many = block_states(head, batch.tokens, states.hidden_states, anchors)
    alone = block_states(head, batch.tokens, states.hidden_states, anchors[:, 1:2], cut=20)
    torch.testing.assert_close(many[:, 1], alone[:, 0], rtol=1e-4, atol=1e-5)
    assert BlockAttention is not None


def block_states(head: Any, tokens: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, cut: int = 99) -> Any:
    from foretell.train.block import BlockAttention

    features = head.with_token_hints(features[:, :cut], tokens[:, :cut])
    read = head.context_kv(head.fuse(features), head.rope_rows(torch.arange(features.shape[1])))
    positions = anchors[..., None] + torch.arange(head.config.block)
    attend = BlockAttention(head.config.layer.scale, head.config.causal_in_block, read, anchors)
    return head(tokens.gather(1, anchors), head.rope_rows(positions), attend)


def test_cached_hidden_states_belong_to_their_step() -> None:
    model = target()
    head = head_for("eagle", model)
    batches = BatchLoader(documents(), 96, 0, CPU)
    assert batches.steps_per_epoch > 3
    fresh, cache = capture_for(head, model), HiddenStateCache(capture_for(head, model), batches)
    cache._free_bytes = 3 * fresh(batches.get(0)).nbytes  # enough for some batches only
    for step in range(2 * batches.steps_per_epoch):
        found, truth = cache.get(step), fresh(batches.get(step))
        assert torch.equal(found.batch.tokens, truth.batch.tokens) and torch.equal(
            found.hidden_states, truth.hidden_states
        )
    assert 0 < len(cache._cache) < batches.steps_per_epoch
    assert sorted(map(batches.batch_index, range(batches.steps_per_epoch))) == list(range(batches.steps_per_epoch))
