"""Writes the heads in `data/`, by the package speculators (0.9.0), and what that package makes of them.

It needs an environment with speculators in it: `pip install speculators==0.9.0`, apart from this project's, because it
asks for an older transformers. Then: `python tests/heads/make_data.py`. The tests read what this wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

DATA = Path(__file__).parent / "data"
VOCAB, WIDTH, LENGTH, STEPS, BLOCK = 40, 16, 14, 3, 4
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "attn_implementation": "eager",
}  # fmt: skip


def main() -> None:
    eagle("eagle3_llama", LlamaConfig(**SIZES, num_hidden_layers=1), draft_vocab_size=24)
    eagle("eagle3_whole", LlamaConfig(**SIZES, num_hidden_layers=2), draft_vocab_size=VOCAB, norm_before_fc=True)
    flags = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    eagle("eagle31_qwen", Qwen3Config(**SIZES, num_hidden_layers=2), draft_vocab_size=24, **flags)
    block("dflash", DFlashSpeculatorConfig, dflash_core, "DFlashDraftModel", draft_vocab_size=VOCAB)
    block("dspark", DSparkSpeculatorConfig, dspark_core, "DSparkDraftModel", draft_vocab_size=24, markov_rank=5)


def about(algorithm: str) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def eagle(name: str, layer: Any, **settings: Any) -> None:
    torch.manual_seed(len(name))
    taps = [2, 4, 5]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, eagle_aux_hidden_state_layer_ids=taps, speculators_config=about("eagle3"),
        **settings,
    )  # fmt: skip
    model = randomised(Eagle3DraftModel(config))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0].clone()))
    features, tokens = torch.randn(1, LENGTH, len(taps) * WIDTH), torch.randint(0, VOCAB, (1, LENGTH))
    model(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    write(name, model, {"features": features[0], "tokens": tokens[0], "logits": torch.stack(logits)})


def block(name: str, kind: type[Any], core: Any, model_class: str, **settings: Any) -> None:
    torch.manual_seed(len(name))
    taps = [1, 3]
    config = kind(
        transformer_layer_config=Qwen3Config(**SIZES, num_hidden_layers=2), aux_hidden_state_layer_ids=taps,
        block_size=BLOCK, mask_token_id=7, speculators_config=about(name), **settings,
    )  # fmt: skip
    model = randomised(getattr(core, model_class)(config))
    features, tokens = torch.randn(1, LENGTH, len(taps) * WIDTH), torch.randint(0, VOCAB, (1, LENGTH))
    seen: dict[str, torch.Tensor] = {}
    whole = model._backbone_forward

    def backbone(*args: Any, **kwargs: Any) -> Any:
        found = whole(*args, **kwargs)
        seen["anchors"] = found[4].view(-1, BLOCK)[:, 0].contiguous()
        return found

    def metrics(logits: torch.Tensor, targets: torch.Tensor, sure: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen["logits"] = logits[0].view(-1, BLOCK, logits.shape[-1]).contiguous()
        if name == "dspark":
            seen["sure"] = sure.view(-1, BLOCK).contiguous()
        return torch.tensor(0.0), {}

    model._backbone_forward, core.compute_metrics = backbone, metrics
    model(
        features, tokens, torch.ones(1, LENGTH), torch.randn(1, LENGTH, WIDTH),
        torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=5,
    )  # fmt: skip
    write(name, model, {"features": features[0], "tokens": tokens[0], **seen})


def randomised(model: Any) -> Any:
    """Weights that tell things apart, norms included, and a map of the vocabulary where there is one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2 if parameter.ndim == 1 else 0.3)
    if model.use_draft_vocab:
        ids = torch.randperm(VOCAB)[: model.draft_vocab_size].sort().values
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[ids] = True
        model.load_vocab_mappings(mask, ids - torch.arange(len(ids)))
    return model.eval()


@torch.no_grad()
def write(name: str, model: Any, seen: dict[str, torch.Tensor]) -> None:
    folder = DATA / name
    model.save_pretrained(str(folder))
    for code in folder.glob("*.py"):  # of the package that wrote it, not needed to read the weights
        code.unlink()
    seen["embed"] = model.embed_tokens.weight.clone()
    if not model.use_draft_vocab:
        seen["output"] = model.lm_head.weight.clone()
    save_file({key: value.detach().contiguous() for key, value in seen.items()}, folder / "expected.st")


if __name__ == "__main__":
    with torch.no_grad():
        main()
