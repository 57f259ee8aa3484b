"""Command-line flags of this server and other engines, config files, and errors before a model is loaded."""

from __future__ import annotations

import argparse
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.main import main, parse
from foretell.cli.serve import Settings, settings
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.server.config import ServerConfig
from foretell.server.foreign_flags import OPTIONAL_VALUE, SWITCHES, WITH_VALUES
from foretell.vllm_config import speculation_from_vllm
from tests.server.process import ServerProcess


def read(*words: str) -> Settings:
    return settings(parse(["serve", *words]))


def speculation(*words: str) -> SpeculationConfig:
    return read(*words)[2]


def test_it_starts_on_the_default_model_with_speculation_on() -> None:
    server, engine, speculation, ignored = read()
    assert (engine, speculation, server) == (EngineConfig(), SpeculationConfig(), ServerConfig())
    assert server.port == 8000 and speculation.budget > 0 and ignored == []


def test_a_model_is_positional_or_a_flag() -> None:
    assert read("gemma3-270m")[1].model == read("--model", "gemma3-270m")[1].model == "gemma3-270m"
    assert read("--model-path", "gemma3-270m")[1].model == "gemma3-270m"


def test_vllms_flags() -> None:
    words = "--host 0.0.0.0 --port 9000 --api-key a --served-model-name m --dtype float32 --max-model-len 512 --seed 3"
    words += " --max-num-seqs 8 --max-num-batched-tokens 256 --gpu-memory-utilization 0.9 --tensor-parallel-size 1"
    words += " --speculative-draft-tensor-parallel-size 1 --enable-prefix-caching --block-size 32"
    server, engine, _, _ = read(*words.split())
    assert (server.host, server.port, server.api_key, server.served_model_name) == ("0.0.0.0", 9000, ("a",), ("m",))
    assert (engine.dtype, engine.max_model_len, engine.max_num_seqs, engine.page_size) == ("float32", 512, 8, 32)
    assert server.seed == 3 and engine.max_num_batched_tokens == 256 and engine.gpu_memory_utilization == 0.9
    asked = speculation("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    assert (asked.drafter, asked.num_speculative_tokens) == ("ngram", 4)
    model = speculation("--speculative-model", "d", "--num-speculative-tokens", "5")
    assert (model.drafter, model.num_speculative_tokens) == ("model:d", 5)
    assert speculation("--speculative-model", "[ngram]").drafter == "ngram"


VLLM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one device": ({"draft_tensor_parallel_size": 1}, {}),
    "split as the target": ({"draft_tensor_parallel_size": 2}, {"draft_tensor_parallel_size": 2}),
    "strict": ({"rejection_sample_method": "strict"}, {"rule": "match"}),
    "probabilistic": ({"rejection_sample_method": "probabilistic"}, {"rule": "rejection"}),
    "the newer word": ({"rejection_sample_method": "standard", "rule": "rejection"}, {"rule": "rejection"}),
    "sampled": ({"draft_sample_method": "probabilistic"}, {}),
    "greedy": ({"method": "ngram", "draft_sample_method": "greedy"}, {"drafter": "ngram"}),
    "other words": ({"use_heterogeneous_vocab": True}, {}),
    "null": ({"draft_tensor_parallel_size": None, "disable_by_batch_size": None}, {}),
    "small batches": (
        {"disable_by_batch_size": 8, "num_speculative_tokens": 5},
        {"num_speculative_tokens_per_batch_size": "[[1, 8, 5]]"},
    ),
}
NOT_VLLM: dict[str, tuple[dict[str, Any], str]] = {
    "rejection_sample_method": ({"rejection_sample_method": "loose"}, "strict or probabilistic"),
    "rejection_sample_method ": ({"rejection_sample_method": "synthetic"}, "OracleDrafter"),
    "rejection_sample_method  ": ({"rejection_sample_method": "strict", "rule": "block"}, "give one"),
    "synthetic_acceptance_rate": ({"synthetic_acceptance_rate": 0.8}, "OracleDrafter"),
    "draft_sample_method": ({"draft_sample_method": "greedy"}, "must be probabilistic"),
    "draft_sample_method ": ({"draft_sample_method": "other"}, "must be probabilistic"),
    "disable_by_batch_size": ({"disable_by_batch_size": 0, "num_speculative_tokens": 5}, "1 or more"),
    "disable_by_batch_size ": ({"disable_by_batch_size": 8}, "needs num_speculative_tokens"),
    "draft_tensor_paralel_size": ({"draft_tensor_paralel_size": 1}, "draft_tensor_parallel_size"),
}


@pytest.mark.parametrize("case", VLLM)
def test_every_key_of_vllms_config_is_applied(case: str) -> None:
    given, meant = VLLM[case]
    found = speculation("--speculative-config", json.dumps({"model": "d", "method": "draft_model"} | given))
    assert found == SpeculationConfig(**{"drafter": "model:d"} | meant)


@pytest.mark.parametrize("case", NOT_VLLM)
def test_or_is_refused_by_its_name(case: str) -> None:
    given, words = NOT_VLLM[case]
    with pytest.raises(RequestError, match=words) as refused:
        speculation_from_vllm({"model": "d", "method": "draft_model"} | given)
    assert refused.value.field == f"speculative_config.{case.strip()}"


def test_sglangs_flags_count_the_root() -> None:
    words = "--speculative-algorithm STANDALONE --speculative-draft-model-path d --speculative-num-steps 5"
    words += " --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    asked = speculation(*words.split())
    assert (asked.drafter, asked.num_speculative_tokens) == ("model:d", 5)
    assert speculation("--speculative-num-draft-tokens", "8").num_speculative_tokens == 7
    assert speculation("--speculative-algorithm", "NGRAM").drafter == "ngram"
    tree = ["--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "17"]
    assert (speculation(*tree).num_speculative_tokens, speculation(*tree).tree_nodes) == (5, 16)
    assert read("--context-length", "99", "--max-running-requests", "3")[1].max_model_len == 99


def test_llama_cpps_and_mlxs_flags() -> None:
    words = "-md d --draft-max 12 --draft-min 2 --draft-p-min 0.5"
    asked = speculation(*words.split())
    assert (asked.drafter, asked.max_draft, asked.min_draft, asked.min_confidence) == ("model:d", 12, 2, 0.5)
    assert asked.num_speculative_tokens is None, "the length is adapted up to the most"
    asked = speculation("--draft-model", "d", "--num-draft-tokens", "3")
    assert (asked.drafter, asked.num_speculative_tokens) == ("model:d", 3)
    assert read("-c", "256", "-np", "2")[1].max_num_seqs == 2
    newer = "-md d --spec-draft-n-max 12 --spec-draft-n-min 2 --spec-draft-p-min 0.5"
    assert speculation(*newer.split()) == speculation(*words.split())
    words = "--spec-type ngram-simple --spec-ngram-size-n 5 --spec-ngram-size-m 24 --spec-ngram-min-hits 1"
    asked, ignored = read(*words.split())[2:]
    assert (asked.drafter, asked.match_lengths, asked.max_draft) == ("ngram", (5, 5), 24)
    assert ignored == ["--spec-ngram-min-hits"]


def test_llama_cpps_lists_of_drafters() -> None:
    assert speculation("--spec-type", "draft-simple,ngram-simple", "-md", "d").drafter == "model:d,ngram"
    assert speculation("--spec-type", "ngram-mod, ngram-map-k").drafter == "ngram"
    with pytest.raises(RequestError, match="did you mean 'NGRAM-MOD'"):
        speculation("--spec-type", "ngram-simple,ngram-mood")
    with pytest.raises(RequestError, match="combines none with others"):
        speculation("--spec-type", "none,ngram-simple")
    with pytest.raises(RequestError, match="needs --speculative-draft-model"):
        speculation("--spec-type", "ngram-simple,draft-simple")


def test_how_wide_a_tree_is_is_not_set() -> None:
    words = "--speculative-algorithm NGRAM --speculative-num-steps 5 --speculative-eagle-topk 8"
    asked, ignored = read(*words.split(), "--speculative-num-draft-tokens", "64")[2:]
    assert (asked.num_speculative_tokens, asked.tree_nodes) == (5, 63)
    assert len(ignored) == 1 and "--speculative-eagle-topk 8" in ignored[0] and "controller" in ignored[0]
    half = read(*words.split())[2]
    assert (half.num_speculative_tokens, half.tree_nodes, half.max_draft) == (None, None, 5)
    with pytest.raises(RequestError, match="1 or more"):
        read("--speculative-eagle-topk", "-1")


def test_a_model_may_have_several_names() -> None:
    server, engine = read("--model", "m", "--served-model-name", "a", "b")[:2]
    assert (engine.model, server.served_model_name) == ("m", ("a", "b"))
    server, engine = read("m", "-a", "a", "--served-model-name", "b", "c")[:2]
    assert (engine.model, server.served_model_name) == ("m", ("a", "b", "c"))
    with pytest.raises(RequestError, match="--model"):
        read("--served-model-name", "a", "m")


IDLE = {
    "--draft-p-min 0.5 --drafter ngram": "min_confidence",
    "--draft-p-min 0.5": "min_confidence",
    "--draft-idle-unload 5 --drafter suffix,ngram": "draft_idle_unload",
    "--draft-temperature entropy --drafter recycle": "draft_temperature",
    "--prompt-lookup-max 3 --drafter suffix": "prompt_lookup_max",
    "--prompt-lookup-min 3 --drafter model:d": "prompt_lookup_min",
    "--acceptance-threshold 0.9": "acceptance_threshold",
    "--acceptance-threshold-lower 0.1 --drafter model:d": "acceptance_threshold_lower",
    "--workload code --drafter model:d --rule match": "workload",
    "--draft-min 8 --max-draft 4": "min_draft",
    "--draft-min 8 --num-speculative-tokens 4": "min_draft",
    """--speculative-config {"method":"none","num_speculative_tokens":4}""": "num_speculative_tokens",
}


@pytest.mark.parametrize("words", IDLE)
def test_options_without_effect_are_rejected_at_start(words: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(*words.split())
    assert refused.value.field == IDLE[words]


@pytest.mark.parametrize(
    "words",
    [
        "--draft-p-min 0.5 --drafter ngram,model:d",
        "--draft-p-min 0.5 --drafter eagle",
        "--prompt-lookup-max 3",
        "--prompt-lookup-max 3 --drafter of-another-package",
        "--rule confidence --workload code --drafter model:d",
        "--draft-min 8",
    ],
)
def test_options_with_effect_are_accepted(words: str) -> None:
    assert read(*words.split())[2] != SpeculationConfig()


ARTICLE = {  # launch lines as they are published, the programs' names left out
    "vllm": "--model M --tensor-parallel-size 1 --speculative-model D --num-speculative-tokens 5 "
    "--speculative-draft-tensor-parallel-size 1",
    "sglang": "--model-path M --speculative-draft-model-path D --num-speculative-tokens 8 --disable-flashinfer 0",
}


@pytest.mark.parametrize("engine", ARTICLE)
def test_published_launch_lines_run(engine: str, folder: Path) -> None:
    words = [str(folder) if word in ("M", "D") else word for word in ARTICLE[engine].split()]
    with ServerProcess(None, *words) as process:
        body: Any = {"prompt": "The quick brown", "max_tokens": 24, "temperature": 0}
        reply = process.post("/v1/completions", **body)
        assert reply["speculation"]["drafters"][f"model:{folder}"]["accepted"] > 0, "the draft is the model itself"
        assert ("--disable-flashinfer" in process.log.read_text()) == (engine == "sglang")


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp-size", "--tp", "-tp"])
def test_ranks_by_all_their_names(flag: str) -> None:
    _, engine, _, _ = read(flag, "4")
    assert engine.tensor_parallel_size == 4


@pytest.mark.parametrize("flag", ["--speculative-draft-tensor-parallel-size", "--draft-tp"])
def test_a_drafts_ranks_by_all_their_names(flag: str) -> None:
    assert speculation(flag, "4").draft_tensor_parallel_size == 4
    with pytest.raises(RequestError, match="must be 1 or more"):
        read(flag, "0")


def test_flags_without_effect_are_accepted_and_listed() -> None:
    words = [
        *SWITCHES,
        *(word for flag in WITH_VALUES for word in (flag, "1")),
        *OPTIONAL_VALUE,
        "--disable-flashinfer",
        "0",
    ]
    server, engine, speculation, ignored = read("m", *words)
    assert set(ignored) == {*SWITCHES, *WITH_VALUES, *OPTIONAL_VALUE}
    assert (engine.model, speculation, server) == ("m", SpeculationConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-num-seq", "3"], "did you mean '--max-num-seqs'?"),
        (["--speculative-num-step", "3"], "did you mean '--speculative-num-steps'?"),
        (["--no-such-thing-at-all"], "there is no option"),
        (["--speculative-config", '{"methd": "ngram"}'], "did you mean 'method'?"),
        (["--speculative-config", '{"method": "ngrm"}'], "did you mean 'ngram'?"),
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-algorithm", "EAGEL"], "did you mean 'EAGLE'?"),
        (["--speculative-algorithm", "STANDALONE"], "needs --speculative-draft-model"),
        (["--drafter", "none", "--num-speculative-tokens", "4"], "has no effect"),
        (["--num-draft-tokens", "3", "--num-speculative-tokens", "4"], "is given twice"),
        (["--speculative-model", "a", "--drafter", "ngram"], "is given twice"),
        (["--port", "70000"], "port"),
        (["--request-timeout", "0"], "request_timeout"),
        (["--max-schema-bytes", "999999"], "max_schema_bytes"),
        (["--host", "no.such.host.invalid"], "host"),
        (["--config", "nowhere.yaml"], "config: nowhere.yaml cannot be read: No such file or directory"),
        (["--log-requests", "/no/such/folder/x"], "log_requests"),
    ],
)
def test_errors_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    try:
        code = main(["serve", str(tiny_folder), *words])
    except SystemExit as leaving:
        code = int(str(leaving.code))
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and expected in message and message.count("nowhere.yaml") <= 1


def test_a_port_in_use_fails_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = main(["serve", "no-such-model", "--port", str(taken.getsockname()[1])])
    assert code == 2 and "choose another --port" in capsys.readouterr().err


def test_a_config_file_equals_flags(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: gemma3-270m\nport: 9001\nprefix_cache: false\nserved-model-name: [a, b]\nmax_model_len: 300\n"
        "speculative_config:\n  method: suffix\n  num_speculative_tokens: 3\ncors_origin: https://a.example\n"
        "enforce-eager: true\ngpu_memory_utilization: 0.9\n"
    )
    server, engine, speculation, ignored = read("--config", str(file))
    assert (engine.model, engine.prefix_cache, engine.max_model_len) == ("gemma3-270m", False, 300)
    assert (server.port, server.served_model_name, server.cors_origin) == (9001, ("a", "b"), ("https://a.example",))
    assert (speculation.drafter, speculation.num_speculative_tokens) == ("suffix", 3) and "--enforce-eager" in ignored
    assert read("--config", str(file), "--port", "1", "other")[0].port == 1, "flags go before the file"
    assert read("--config", str(file), "other")[1].model == "other"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot: 1", "did you mean 'port'?"),
        ("port: many", "port"),
        ("- port", "must have lines"),
        ("a: [", "is not YAML"),
        ("config: x", "has no setting"),
    ],
)
def test_an_invalid_config_file_is_rejected(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(RequestError, match=re.escape(expected)):
        read("--config", str(file))


def test_every_flag_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--help-all"])
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in shown for name in ServerConfig.__dataclass_fields__)
    assert isinstance(parse(["serve"]), argparse.Namespace)
