"""A dozen requests to a server: the verdict, its cause, and the words for both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.bench.check import (
    OFF,
    ON,
    TASKS,
    CheckFacts,
    facts_of,
    remarks,
    report_table,
    run_check,
    running_requests,
    variants_of,
)
from foretell.bench.check import UNKNOWN as CANNOT_TELL
from foretell.bench.compare import CompareSample
from foretell.bench.peers import Endpoint, PeerReply
from foretell.bench.prompt import BenchPrompt
from foretell.cli import main as program
from foretell.errors import RequestError
from tests.server.process import ServerProcess

from .fakes import ignore_progress, items
from .peers import Script, serving

FAST = CheckFacts(12, 6.0, 48, 0.1, True, 1.8, 1.5, (1.3, 1.7), True)


def test_requests_a_second() -> None:
    assert FAST.requests_per_second == 2.0


EVEN, SLOW = replace(FAST, speedup=1.01), replace(FAST, speedup=0.8, speedup_interval=(0.7, 0.9))
UNKNOWN = replace(FAST, speedup=None, speedup_interval=None)


@pytest.mark.parametrize(
    ("facts", "verdict", "cause", "message"),
    [
        (FAST, "pays", "acceptance", "1.80 tokens per step"),
        (replace(FAST, speedup_interval=None), "pays", "acceptance", "(speedup 1.50)"),
        (
            replace(EVEN, accepted_per_step=1.1),
            "makes no difference",
            "acceptance",
            "too few draft tokens are accepted, 1.10",
        ),
        (replace(FAST, speedup_interval=(0.9, 1.7)), "makes no difference", "steps", "verification makes steps"),
        (replace(EVEN, first_token_share=0.8), "makes no difference", "length", "80% of the time is spent"),
        (replace(SLOW, other_requests=9), "costs time", "load", "9 other requests"),
        (replace(SLOW, tokens=5), "costs time", "length", "outputs of 5 tokens"),
        (replace(FAST, drafted=False), "is off", "", "Start the server with a drafter"),
        (UNKNOWN, CANNOT_TELL, "", "where 1 is plain decoding"),
        (replace(UNKNOWN, accepted_per_step=None, drafted=None), CANNOT_TELL, "", "turn speculation off"),
        (replace(UNKNOWN, accepted_per_step=1.05), CANNOT_TELL, "acceptance", "too few draft tokens are accepted"),
    ],
)
def test_the_verdict_has_a_cause(facts: CheckFacts, verdict: str, cause: str, message: str) -> None:
    assert (facts.verdict, facts.cause) == (verdict, cause)
    assert (
        message in facts.message
        and f" {'cannot be determined' if verdict == CANNOT_TELL else verdict} here" in facts.message
    )
    assert facts.message.endswith(".") and "\n" not in facts.message


def sample(item: str, peer: str, a_token: float, steps: float | None, text: str = "t") -> CompareSample:
    return CompareSample(BenchPrompt(item, item), 1, peer, PeerReply(text, 11, 1.0, 1.0 + 10 * a_token, steps))


def test_facts_are_those_of_pairs() -> None:
    pairs = [
        sample("a", ON, 0.5, 5.5),
        sample("a", OFF, 1.0, 11.0),
        sample("b", ON, 0.25, 11.0),
        sample("b", OFF, 1.0, 11.0),
    ]
    facts, cells, overall = facts_of(pairs, 2.0, 3)
    assert facts.speedup == pytest.approx(8**0.5) and facts.same_text is True and facts.drafted is True
    assert (facts.requests, facts.tokens, facts.other_requests) == (4, 11, 3)
    assert facts.accepted_per_step == pytest.approx(1.5) and facts.first_token_share == pytest.approx(
        (1 / 6 + 1 / 3.5) / 2
    )
    assert [(cell["task"], cell["speedup"]) for cell in cells] == [("a", pytest.approx(2.0)), ("b", pytest.approx(4.0))]
    assert overall["speedup"] == pytest.approx(8**0.5) and overall["task"] == "all" and overall["same_text"] is True
    assert all(cell["speedup_interval"] is None for cell in cells), "one pair tells none"
    others = [replace(each, prompt=replace(each.prompt, id="another")) for each in pairs[:2]]
    two, (cell,), _ = facts_of([*pairs[:2], *others], 2.0, 0)
    assert two.speedup_interval == cell["speedup_interval"] == pytest.approx((2.0, 2.0))


def test_a_switch_that_does_nothing_is_no_switch() -> None:
    facts, *_ = facts_of([sample("a", ON, 0.5, 5.5), sample("a", OFF, 0.5, 5.5)], 2.0, 0)
    assert facts.speedup is None and facts.verdict == CANNOT_TELL


def test_who_can_be_asked_both_ways() -> None:
    kinds = {"foretell": {"speculative": False}, "llamacpp": {"speculative.n_max": 0}}
    for kind, switch in kinds.items():
        on, off = variants_of(replace(Endpoint.parse("127.0.0.1:9"), kind=kind))
        assert (on.name, off.name, off.extra) == (ON, OFF, switch) and not on.extra
    assert [variant.name for variant in variants_of(replace(Endpoint.parse("127.0.0.1:9"), kind="vllm"))] == [ON]


def test_twelve_requests_and_what_others_do() -> None:
    script = Script("vllm")
    script.metrics = 'vllm:num_requests_running{{m="x"}} 7.0\nvllm:spec_decode_num_accepted_tokens_total {accepted}\n'
    with serving(script) as url:
        endpoint = Endpoint.parse(url)
        endpoint.connect()
        assert running_requests(endpoint) == 7
        found = run_check(endpoint, items(chat=20), ignore_progress, {})
    assert len(script.params) == 13, "one to warm up"
    assert (found.facts.requests, found.facts.other_requests, found.facts.verdict, found.facts.cause) == (
        12,
        7,
        CANNOT_TELL,
        "load",
    )
    assert found.facts.accepted_per_step == pytest.approx(2.0)
    assert "7 other requests were running" in remarks(found)[0]


def test_a_server_that_refuses_is_reported() -> None:
    script = Script("vllm")
    script.last = {"error": {"message": "no such model"}}
    with serving(script) as url, pytest.raises(RequestError, match="does not serve: no such model; start the server"):
        run_check(Endpoint.parse(url), items(chat=20), ignore_progress, {})


# As it is typed


def test_our_own_server(capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path) -> None:
    page = tmp_path / "check.html"
    assert program.main(["bench", "check", server.url, "--html", str(page)]) == 0
    out, _ = capsys.readouterr()
    reported = json.loads(out.splitlines()[-1])
    assert reported["verdict"] in ("pays", "makes no difference", "costs time", "is off")
    assert reported["requests_per_second"] > 0 and reported["same_text"] is True and reported["errors"] == 0
    assert {row["task"] for row in reported["cells"]} == set(TASKS)
    assert [row["task"] for row in reported["overall"]] == ["all"] and reported["overall"][0]["speedup"] == reported[
        "speedup"
    ]
    assert all("speedup_interval" in row for row in (*reported["cells"], *reported["overall"]))
    assert "machine: cores" in page.read_text()
    assert "Speculation " in out and "12 requests one after the other" in out
    assert "Foretell bench: check" in page.read_text()


def test_an_unreachable_server_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["bench", "check", "http://127.0.0.1:1"]) == 2
    _, err = capsys.readouterr()
    assert "no server at 127.0.0.1:1; start it" in err and err.count("\n") == 1


def test_the_table_has_a_row_for_each_task() -> None:
    with serving(Script("unknown")) as url:
        found = run_check(Endpoint.parse(url), items(chat=1), ignore_progress, {})
    rows = report_table(found).rows
    assert rows[0][:2] == ["chat", "8"] and rows[-1][-4:] == ["-"] * 4
