"""The default model on two and three processes; its three KV heads do not divide by two."""

from __future__ import annotations

import pytest
import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.certify.text_equality import NEAR_TIE, PROMPTS, scores_after
from foretell.tensor_parallel import weight_bytes

MODEL = "smollm2-135m"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
OPTIONS: dict[str, object] = {"kv_memory": 0.3, "max_model_len": 512, "quiet": True, "num_speculative_tokens": 4}


def texts(llm: LLM, **choice: object) -> list[tuple[int, ...]]:
    outputs = llm.generate(list(PROMPTS), GREEDY, speculation=SpeculationChoice(**choice))  # type: ignore[arg-type]
    return [output.outputs[0].token_ids for output in outputs]


def near_tie(whole: LLM, prompt: str, mine: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Return whether the first two tokens that differ are a near-tie for the unsharded model."""
    place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    text = [*whole.tokenizer.encode(prompt), *theirs[:place]]
    scores, scale = scores_after(whole, text, GREEDY, 0)
    return abs(float(scores[mine[place]] - scores[theirs[place]])) <= NEAR_TIE[torch.float32] * scale


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(("size", "share"), [(2, 0.54), (3, 0.35)])
def test_floats(size: int, share: float) -> None:
    whole = LLM(MODEL, drafter="none", quantization="none", kv_memory=0.3, max_model_len=512, quiet=True)
    alone, weights = texts(whole), weight_bytes(whole.engine.runner.model)
    with LLM(MODEL, drafter=f"ngram,model:{MODEL}", quantization="none", tensor_parallel_size=size, **OPTIONS) as llm:
        plain = texts(llm, enabled=False)
        assert texts(llm, drafter="ngram") == texts(llm, drafter=f"model:{MODEL}") == plain
        assert llm.assembly.workers is not None
        held = [weight_bytes(llm.engine.runner.model), *llm.assembly.workers.wait_ready()]
    assert max(held) < share * weights
    differ = [i for i, (a, b) in enumerate(zip(plain, alone, strict=True)) if a != b]
    assert all(near_tie(whole, PROMPTS[i], plain[i], alone[i]) for i in differ)


@pytest.mark.slow
@pytest.mark.weights
def test_integers() -> None:
    with LLM(MODEL, drafter=f"ngram,model:{MODEL}", tensor_parallel_size=2, **OPTIONS) as llm:
        plain = texts(llm, enabled=False)
        assert texts(llm, drafter="ngram") == texts(llm, drafter=f"model:{MODEL}") == plain
