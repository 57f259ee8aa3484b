"""The command `foretell plan`."""

from __future__ import annotations

import json
import re
import shlex
import xml.dom.minidom
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.main import main
from foretell.plan.bench_reader import BenchProvenance
from foretell.plan.devices import find_device
from foretell.plan.model_shape import find_model_shape
from tests.docs_check import ROOT, commands
from tests.laws.test_layers import loaded_by
from tests.plan.deployments import DATA, LLAMA

EXAMPLE = "--target llama-3.1-70b --draft llama-3.2-1b --gpu h100 --count 4 --acceptance 0.8 --batch 1..64 --context 8k"


def plan(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    try:
        code = main(["plan", *shlex.split(line)])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    return code, *capsys.readouterr()


def plan_json(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    code, out, err = plan(capsys, f"{line} --json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_plan_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, EXAMPLE)
    assert code == 0
    title = " ".join(out.split())
    assert title.startswith("llama-3.1-70b (70.6 billion weights, bfloat16) on NVIDIA H100 SXM x 4, tensor parallel 4;")
    rows = [line.split() for line in out.splitlines() if line[:5].strip().isdigit()]
    speeds = [row for row in rows if "faster" in row][:7]
    assert [int(row[0]) for row in speeds] == [1, 2, 4, 8, 16, 32, 64] and speeds[-1][-2:] == ["too", "big"]
    assert [int(row[0]) for row in rows if "faster" not in row] == [1, 2, 4, 8, 16, 32, 64], "parts of a step"
    assert all(re.fullmatch(r"\d\.\d\dx", row[1]) for row in speeds)
    assert "Other tensor parallel (TP) sizes" in out and "there is room for 34 sequences" in " ".join(out.split())
    assert "Speedup by batch" in out and "Not calibrated" in out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "line",
    [
        EXAMPLE,
        f"{EXAMPLE},128k",
        "--target smollm2-135m --draft ngram --gpu cpu --batch 1..4096",
        "--target llama-3.1-405b --draft eagle --gpu h100 --count 8 --batch 1..65536 --context 2k,32k",
        "fleet --target llama-3.1-8b --draft eagle --rate 5 --seconds 60 --ttft 0.5",
    ],
)
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = plan(capsys, line)
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= width


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = plan_json(capsys, f"{EXAMPLE} --out {tmp_path / 'plan.json'}")
    assert json.loads((tmp_path / "plan.json").read_text()) == found
    first, *_, last = found["rows"]
    assert first["batch"] == 1 and last["batch"] == 64 and last["fits"] is False
    assert first["speedup"] > last["speedup"] > 1 and 0 < first["break_even_acceptance"] < 0.8
    steps = found["step_parts_ms"]
    assert sum(steps.values()) + 1e3 * found["efficiency"]["host"] == pytest.approx(first["plain_step_ms"])
    price = found["dollars_per_hour"] / 3600 / first["tokens_per_second"] * 1e6
    assert first["dollars_per_million_tokens"] == pytest.approx(price)
    assert [row["tensor_parallel"] for row in found["tensor_parallel_rows"]] == [1, 2, 4]


@pytest.mark.parametrize("draft", ["eagle", "self:int4", "llama-3.2-1b"])
def test_tensor_parallel_rows_do_not_depend_on_the_requested_size(
    capsys: pytest.CaptureFixture[str], draft: str
) -> None:
    """A head and a quantized copy are split with the target, a draft model is not."""
    line = f"--target llama-3.1-8b --draft {draft} --gpu h100 --count 4 --batch 8 --tensor-parallel"
    one, four = (plan_json(capsys, f"{line} {split}")["tensor_parallel_rows"] for split in (1, 4))
    assert one == four and [row["tensor_parallel"] for row in one] == [1, 2, 4]


def test_device_values_can_be_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    default = plan_json(capsys, "--target llama-3.1-8b --batch 8")["rows"][0]
    priced = plan_json(capsys, "--target llama-3.1-8b --batch 8 --price 6")["rows"][0]
    assert priced["dollars_per_million_tokens"] == pytest.approx(2 * default["dollars_per_million_tokens"])
    faster = plan_json(capsys, "--target llama-3.1-8b --batch 8 --bandwidth 6700 --tflops 1978 --memory 10")["rows"][0]
    assert faster["plain_step_ms"] < 0.65 * default["plain_step_ms"] and faster["fits"] is False
    fixed = plan_json(capsys, "--target llama-3.1-8b --batch 8 --length 3 --context 1k,4k")["rows"]
    assert [(row["context"], row["length"]) for row in fixed] == [(1024, 3), (4096, 3)]


def test_a_plan_can_be_calibrated_by_a_bench_run(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--target inflated-5.9b --draft smollm2-135m --gpu h200 --batch 1,32 --context 512 --calibrate {DATA}"
    found = plan_json(capsys, f"{line}/h200-5.9b.json")
    cells = json.loads((DATA / "h200-5.9b.json").read_text())["cells"]
    plain = {cell["texts"]: cell["wall_ms"] for cell in cells if cell["context"] == 512 and cell["length"] == 0}
    for row in found["rows"]:
        assert row["plain_step_ms"] == pytest.approx(plain[row["batch"]], rel=0.1)
    assert found["calibration"]["steps"] == 67 and found["calibration"]["worst_error"] < 0.2
    assert "Calibrated on 67 measured steps" in " ".join(found["remarks"])
    assert plan_json(capsys, f"{line}/h200-gpu.json")["calibration"]["worst_error"] < 0.1
    assert found["calibration"]["doubts"] == [] and not any("The run is of" in each for each in found["remarks"])


def test_a_run_of_another_model_or_device_gives_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--target llama-3.1-8b --gpu h100 --batch 1 --context 512 --calibrate {DATA}/h200-5.9b.json"
    remarks = " ".join(plan_json(capsys, line)["remarks"])
    assert "The run is of a model of other sizes, the plan for llama-3.1-8b" in remarks
    assert "The run is of NVIDIA H200, the plan for h100" in remarks


@pytest.mark.parametrize(
    ("run", "target", "gpu", "warnings"),
    [
        ({"model": "smollm2-135m", "machine": {"device": "AMD EPYC"}}, "smollm2-135m", "cpu", 0),
        (
            {"model": "/m/Llama-3.1-8B-Instruct/", "device": "NVIDIA A100-SXM4-80GB"},
            "llama-3.1-8b",
            "a100-80gb",
            0,
        ),
        ({"model": "smollm2-135m", "device": "NVIDIA H200"}, "smollm2-135m", "cpu", 1),
        ({"model": "smollm2-135m", "device": "AMD EPYC"}, "llama-3.1-8b", "h100", 2),
        ({}, "llama-3.1-8b", "h100", 0),
    ],
)
def test_names_are_compared_without_punctuation_and_case(
    tmp_path: Path, run: dict[str, object], target: str, gpu: str, warnings: int
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert (
        len(BenchProvenance.from_file(path).warnings(find_model_shape(target, "target"), find_device(gpu))) == warnings
    )


def test_svg_and_html_are_self_contained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawing, page = tmp_path / "plan.svg", tmp_path / "plan.html"
    code, _, err = plan(capsys, f"{EXAMPLE} --svg {drawing} --html {page} --no-plot")
    assert code == 0, err
    parsed = xml.dom.minidom.parse(str(drawing))
    assert len(parsed.getElementsByTagName("polyline")) == 7  # four lengths and the best; two batches
    tags: list[tuple[str, dict[str, str | None]]] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    reader.feed(page.read_text())
    assert [tag for tag, _ in tags].count("svg") == 2 and [tag for tag, _ in tags].count("table") == 3
    assert not [attrs for _, attrs in tags if {"src", "href"} & set(attrs)], "nothing is fetched"


def test_a_fleet_of_a_given_size_and_the_smallest_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = "fleet --target llama-3.1-8b --draft eagle --rate 30 --prompt 800 --output 200 --seconds 60 --ttft 0.5"
    found = plan_json(capsys, line)
    assert found["meets_goals"] is True and found["first_token_p99"] <= 0.5
    again = plan_json(capsys, f"{line} --replicas {found['replicas']}")
    assert again["first_token_p99"] == found["first_token_p99"]
    assert plan_json(capsys, f"{line} --replicas 1")["meets_goals"] is (found["replicas"] == 1)
    code, out, _ = plan(capsys, line)
    assert (
        code == 0
        and "the smallest fleet that meets the SLOs" in " ".join(out.split())
        and "dollars per million output tokens" in out
    )


def test_a_fleet_without_goals_meets_none(capsys: pytest.CaptureFixture[str]) -> None:
    line = "fleet --target llama-3.1-8b --draft eagle --rate 30 --prompt 800 --output 200 --seconds 60"
    _, out, _ = plan(capsys, line)
    said = " ".join(out.split())
    assert "the smallest fleet that keeps up with the requests. No SLO was given" in said and "meets" not in said
    _, out, _ = plan(capsys, f"{line} --replicas 9")
    assert "9 replicas" in out and "keeps up with the requests." in " ".join(out.split())
    _, out, _ = plan(capsys, f"{line} --replicas 9 --ttft 9")
    assert "meets the SLOs." in " ".join(out.split())


def test_routing_and_speculation_matter(capsys: pytest.CaptureFixture[str]) -> None:
    line = "fleet --target llama-3.1-8b --draft eagle --rate 40 --replicas 3 --seconds 60 --prefixes 2000"
    routes = {name: plan_json(capsys, f"{line} --routing {name}") for name in ("random", "prefix")}
    assert routes["prefix"]["cached_share"] >= routes["random"]["cached_share"] > 0
    modes = {mode: plan_json(capsys, f"{line} --speculation {mode}") for mode in ("off", "load")}
    assert modes["load"]["per_token_p50"] < modes["off"]["per_token_p50"]


WRONG = [
    ("", "target: is missing; use --target llama-3.1-8b"),
    ("--target llama-3.1-8c", "did you mean 'llama-3.1-8b'?"),
    ("--target phi-4 --gpu h1000", "gpu: 'h1000' is not known; did you mean 'h100'?"),
    ("--target phi-4 --gpu abacus", "known: a10"),
    ("--target phi-4 --draft lama-3.2-1b", "draft: 'lama-3.2-1b' is not known; did you mean 'llama-3.2-1b'?"),
    ("--target phi-4 --draft none", "draft: none is plain decoding"),
    ("--target phi-4 --acceptance 1.5", "acceptance: must be between 0 and 1"),
    ("--target phi-4 --batch none", "is not a batch size such as 8, 1,8,32 or 1..64"),
    ("--target phi-4 --batch 8..2", "is not a batch size"),
    ("--target phi-4 --batch ,", "batch: must be 1 or more"),
    ("--target phi-4 --context 0", "is not a number of tokens"),
    ("--target phi-4 --context 32k", "context: 32768 exceeds the context length of phi-4, 16384"),
    ("--target phi-4 --count 0", "count: must be 1 or more"),
    ("--target phi-4 --count 3", "40 heads cannot be split over 3 devices; use 1"),
    ("--target phi-4 --count 4 --tensor-parallel 3", "heads cannot be split"),
    ("--target phi-4 --price 0", "price: must be above 0"),
    ("--target phi-4 --calibrate none.json", "none.json cannot be read"),
    ("--target phi-4 --dtyp int8", "did you mean '--dtype'?"),
    ("--target phi-4 --svg none/plan.svg", "there is no folder none"),
    ("fleets --target phi-4", "plan: has no 'fleets'; did you mean 'fleet'?"),
    ("--target phi-4 --rate 3", "rate: is for a fleet; use foretell plan fleet"),
    ("fleet --target phi-4 --rate 3 --batch 8", "batch: is not for a fleet"),
    ("fleet --target phi-4", "rate: is missing"),
    ("fleet --target phi-4 --rate 0", "rate: must be above 0"),
    ("fleet --target phi-4 --rate 1 --seconds 5", "which is too few"),
    ("fleet --target phi-4 --rate 1 --burst 9 --arrivals bursty", "burst: must be 5 or less"),
    ("fleet --target phi-4 --rate 1 --prefixes 3 --prompt 100", "prefix_tokens: must be fewer"),
    ("fleet --target llama-3.1-405b --rate 1", "has no memory for one sequence"),
    ("fleet --target phi-4 --rate 1 --tpot 0.0001", "replicas do not meet the SLOs"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_bad_input_gives_a_one_line_error(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    code, out, err = plan(capsys, line)
    assert code in (1, 2) and not out
    assert words in err and err.count("\n") == 1, err


def test_a_config_that_is_not_generative_is_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 768}))
    code, _, err = plan(capsys, f"--target {path}")
    assert code == 2 and "BertModel is not a language model" in err and err.count("\n") == 1
    path.write_text(json.dumps(LLAMA))
    assert plan_json(capsys, f"--target {path} --batch 1")["target"]["weights"] > 8e9


def test_planning_needs_no_torch() -> None:
    statement = "from foretell.cli.main import main; main(['plan', '--target', 'phi-4', '--batch', '1', '--json'])"
    assert not loaded_by(f"{statement.replace('main([', 'assert not main([')}; print()") & {"torch", "numpy"}


PAGES = [ROOT / "docs" / "how-to" / "plan-capacity.md", ROOT / "docs" / "explanation" / "planning-model.md"]
PAGE = [line for page in PAGES for line in commands(page) if line.startswith("foretell plan")]
LONG = [pytest.param(line, marks=pytest.mark.slow) for line in PAGE if "--rate 1000" in line]  # of minutes each
SHORT = [line for line in PAGE if "--rate 1000" not in line]


@pytest.mark.parametrize("line", [*SHORT, *LONG])
def test_the_commands_of_the_docs_run(
    capsys: pytest.CaptureFixture[str], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    code, out, err = plan(capsys, line.removeprefix("foretell plan"))
    assert code == 0 and out.strip(), err


def test_the_docs_have_commands() -> None:
    assert len(PAGE) >= 4, "or the test above tests nothing"


def test_a_short_context_is_planned_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--target", str(tmp_path), "--no-plot", "--json"]) == 0
    assert {row["context"] for row in json.loads(capsys.readouterr().out)["rows"]} == {1024}
