"""Every speculation flag of other engines' servers works, or is refused with a reason; none gets a wrong hint."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from foretell.cli.main import build_parser, main, parse
from foretell.cli.serve import settings
from foretell.errors import RequestError
from foretell.options import very_close
from foretell.server.foreign_flags import ONLY, OPTIONAL_VALUE, SWITCHES, UNSUPPORTED, WITH_VALUES
from foretell.vllm_config import NO_EFFECT, VLLM_KEYS, speculation_from_vllm
from foretell.vllm_config import UNSUPPORTED as KEYS_UNSUPPORTED

# vLLM 0.32, SGLang 0.5.23 (its whole list) and llama.cpp of October 2026.
FLAGS = """
    --speculative-config -sc --spec-method --spec-model --spec-tokens --per-request-spec-decode-metrics

    --speculative-algorithm --uno-lora-path --speculative-draft-model-path --speculative-draft-model
    --speculative-draft-model-revision --speculative-draft-load-format --speculative-num-steps --speculative-eagle-topk
    --speculative-num-draft-tokens --speculative-dflash-block-size --speculative-domino-candidate-pool-size
    --speculative-dspark-block-size --speculative-dspark-sps-table-path --speculative-dspark-confidence-sts-path
    --speculative-dspark-align-verify-tokens-to-graph-tier --speculative-accept-threshold-single
    --speculative-accept-threshold-acc --speculative-use-rejection-sampling --speculative-use-block-verification
    --speculative-token-map --speculative-attention-mode --speculative-draft-attention-backend
    --speculative-dsa-topk-backend --speculative-draft-kv-cache-dtype --speculative-draft-window-size
    --speculative-draft-sink-size --speculative-moe-runner-backend --speculative-moe-a2a-backend
    --speculative-enable-w4a4-mxfp4-megamoe --speculative-draft-model-quantization --enable-multi-layer-eagle
    --speculative-adaptive --speculative-adaptive-config --spec-trace-dir --speculative-ngram-min-bfs-breadth
    --speculative-ngram-max-bfs-breadth --speculative-ngram-match-type --speculative-ngram-max-trie-depth
    --speculative-ngram-capacity --speculative-ngram-external-corpus-path --speculative-ngram-external-sam-budget
    --speculative-ngram-external-corpus-max-tokens --enable-dp-lm-head --mem-fraction-static --max-running-requests

    --spec-type --spec-default --spec-draft-model -md --spec-draft-hf -hfd --spec-draft-n-max --spec-draft-n-min
    --spec-draft-p-split --spec-draft-p-min --spec-draft-conf-min --spec-draft-ngl --spec-draft-device
    --spec-draft-threads --spec-draft-threads-batch --spec-draft-cpu-mask --spec-draft-cpu-range --spec-draft-prio
    --spec-draft-poll --cpu-mask --cpu-range --prio --poll --spec-draft-type-k --spec-draft-type-v
    --spec-draft-override-tensor --spec-draft-cpu-moe --spec-draft-backend-sampling --spec-ngram-mod-n-match
    --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-simple-size-n --spec-ngram-simple-size-m
    --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits
    --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-synth-len
    --spec-synth-rates --draft-max --draft-min
"""
# Of vLLM's --speculative-config, besides the fields of SpeculationConfig.
KEYS = """
    method model draft_tensor_parallel_size quantization moe_backend attention_backend kv_cache_dtype max_model_len
    revision code_revision enforce_eager index_share_for_mtp_iteration disable_padded_drafter_batch
    disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab parallel_drafting
    suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates
    synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk
"""
# Of their benchmarks, trainers and converters: no server has them.
ELSEWHERE = """
    --num-prompts --spec-bench-category --speed-bench-config --target-model-dir --total-seq-len --draft-vocab-size
    --enable-confidence-head --vllm-endpoint --verifier-name-or-path --max-anchors --num-depths --markov-rank
"""
IGNORED = {*SWITCHES, *WITH_VALUES, *OPTIONAL_VALUE, *ONLY}
WORKS: dict[str, dict[str, Any]] = {
    "--speculative-use-rejection-sampling": {"rule": "rejection"},
    "--speculative-use-block-verification": {"rule": "block"},
    "--speculative-use-rejection-sampling --speculative-use-block-verification": {"rule": "block"},
    "--speculative-draft-model-path d --speculative-draft-model-revision v1": {
        "drafter": "model:d",
        "draft_revision": "v1",
    },
    "--spec-draft-model d.gguf": {"drafter": "model:d.gguf"},
    "--spec-draft-hf ggml-org/d-GGUF": {"drafter": "model:ggml-org/d-GGUF:latest"},
    "-hfd ggml-org/d-GGUF:Q8_0 --spec-type draft-simple": {"drafter": "model:ggml-org/d-GGUF:Q8_0"},
    "--spec-type ngram-mod,ngram-map-k4v": {"drafter": "ngram"},
    "--spec-type ngram-mod --spec-ngram-mod-n-match 24 --spec-ngram-mod-n-min 8 --spec-ngram-mod-n-max 64": {
        "prompt_lookup_max": 24,
        "min_draft": 8,
        "max_draft": 64,
    },
    "--speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1": {"rule": "match"},
}


@pytest.fixture(scope="module")
def known() -> dict[str, argparse.Action]:
    return build_parser(["serve"])[1]["serve"]._option_string_actions


@pytest.mark.parametrize("flag", FLAGS.split())
def test_a_speculation_flag_works_or_is_refused_with_a_reason(
    flag: str, known: dict[str, argparse.Action], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in known
    assert (flag in IGNORED) + (flag in UNSUPPORTED) + (known[flag].help != argparse.SUPPRESS) == 1
    if flag in UNSUPPORTED:
        assert main(["serve", "m", flag]) == 2
        error = capsys.readouterr().err
        assert f"{flag}: is not supported here: {UNSUPPORTED[flag]}" in error and "did you mean" not in error


@pytest.mark.parametrize("line", WORKS)
def test_the_new_names_mean_what_they_do_there(line: str) -> None:
    speculation = settings(parse(["serve", "m", *line.split()]))[2]
    assert {name: getattr(speculation, name) for name in WORKS[line]} == WORKS[line]


def test_a_lossy_threshold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--speculative-accept-threshold-single", "0.9"]) == 2
    assert "a lossy rule is --rule typical" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ELSEWHERE.split())
def test_an_unknown_flag_gets_no_unrelated_hint(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "m", flag, "1"])
    error = capsys.readouterr().err
    assert f"there is no option {flag}" in error and "did you mean" not in error


@pytest.mark.parametrize("key", KEYS.split())
def test_a_key_of_vllm_works_or_is_refused_with_a_reason(key: str) -> None:
    assert (key in VLLM_KEYS) + (key in NO_EFFECT) + (key in KEYS_UNSUPPORTED) == 1
    if key in KEYS_UNSUPPORTED:
        with pytest.raises(RequestError, match=re.escape(KEYS_UNSUPPORTED[key])):
            speculation_from_vllm({"method": "ngram", key: 1})
    if key in NO_EFFECT:
        assert speculation_from_vllm({"method": "ngram_gpu", key: True}).drafter == "ngram"


def test_the_revision_of_vllm_is_the_draft_models() -> None:
    assert speculation_from_vllm({"model": "d", "revision": "v1"}).draft_revision == "v1"


def test_a_hint_is_for_typing_errors_only(known: dict[str, argparse.Action]) -> None:
    shown = [name.lstrip("-") for name, action in known.items() if action.help != argparse.SUPPRESS]
    for flag in ("speculative-token-map", "speculative-draft-window-size", "spec-draft-ngl", "spec-draft-cpu-moe"):
        assert very_close(flag, shown) is None
    for mistyped, flag in {"prot": "port", "modle": "model", "max-model-length": "max-model-len"}.items():
        assert very_close(mistyped, shown) == flag
