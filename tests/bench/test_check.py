"""A dozen requests to a server: the verdict, its cause, and the words for both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.bench.check import OFF, ON, TASKS, Facts, arms_of, facts_of, markdown, remarks, run_check, running
from foretell.bench.compare import CompareSample
from foretell.bench.peers import Endpoint, Reply
from foretell.bench.prompt import BenchPrompt
from foretell.cli import main as program
from foretell.errors import RequestError
from tests.server.process import ServerProcess

from .fakes import items, watch_nothing
from .peers import Script, serving

FAST = Facts(12, 6.0, 48, 0.1, True, 1.8, 1.5, (1.3, 1.7), True)


def test_requests_a_second() -> None:
    assert FAST.requests_per_second == 2.0


EVEN, SLOW = replace(FAST, speedup=1.01), replace(FAST, speedup=0.8, speedup_interval=(0.7, 0.9))
UNKNOWN = replace(FAST, speedup=None, speedup_interval=None)


@pytest.mark.parametrize(
    ("facts", "verdict", "cause", "words"),
    [
        (FAST, "pays", "acceptance", "1.80 tokens come out of a step"),
        (replace(FAST, speedup_interval=None), "pays", "acceptance", "(1.50 times as fast as without)"),
        (replace(EVEN, accepted_per_step=1.1), "makes no difference", "acceptance", "too few guesses stand, 1.10"),
        (replace(FAST, speedup_interval=(0.9, 1.7)), "makes no difference", "steps", "steps that check them"),
        (replace(EVEN, reading=0.8), "makes no difference", "length", "80% of the time goes by"),
        (replace(SLOW, others=9), "costs time", "load", "9 other texts"),
        (replace(SLOW, tokens=5), "costs time", "length", "texts of 5 tokens"),
        (replace(FAST, drafted=False), "is off", "", "Start the server with a drafter"),
        (UNKNOWN, "cannot be told", "", "where 1 is plain decoding"),
        (replace(UNKNOWN, accepted_per_step=None, drafted=None), "cannot be told", "", "without guesses."),
        (replace(UNKNOWN, accepted_per_step=1.05), "cannot be told", "acceptance", "too few guesses stand"),
    ],
)
def test_the_verdict_has_a_cause(facts: Facts, verdict: str, cause: str, words: str) -> None:
    assert (facts.verdict, facts.cause) == (verdict, cause)
    assert words in facts.words and f" {verdict} here" in facts.words
    assert facts.words.endswith(".") and "\n" not in facts.words


def sample(item: str, peer: str, a_token: float, steps: float | None, text: str = "t") -> CompareSample:
    return CompareSample(BenchPrompt(item, item), 1, peer, Reply(text, 11, 1.0, 1.0 + 10 * a_token, steps))


def test_facts_are_those_of_pairs() -> None:
    pairs = [
        sample("a", ON, 0.5, 5.5),
        sample("a", OFF, 1.0, 11.0),
        sample("b", ON, 0.25, 11.0),
        sample("b", OFF, 1.0, 11.0),
    ]
    facts, cells, overall = facts_of(pairs, 2.0, 3)
    assert facts.speedup == pytest.approx(8**0.5) and facts.same_text is True and facts.drafted is True
    assert (facts.requests, facts.tokens, facts.others) == (4, 11, 3)
    assert facts.accepted_per_step == pytest.approx(1.5) and facts.reading == pytest.approx((1 / 6 + 1 / 3.5) / 2)
    assert [(cell["task"], cell["speedup"]) for cell in cells] == [("a", pytest.approx(2.0)), ("b", pytest.approx(4.0))]
    assert overall["speedup"] == pytest.approx(8**0.5) and overall["task"] == "all" and overall["same_text"] is True
    assert all(cell["speedup_interval"] is None for cell in cells), "one pair tells none"
    others = [replace(each, item=replace(each.item, id="another")) for each in pairs[:2]]
    two, (cell,), _ = facts_of([*pairs[:2], *others], 2.0, 0)
    assert two.speedup_interval == cell["speedup_interval"] == pytest.approx((2.0, 2.0))


def test_a_switch_that_does_nothing_is_no_switch() -> None:
    facts, *_ = facts_of([sample("a", ON, 0.5, 5.5), sample("a", OFF, 0.5, 5.5)], 2.0, 0)
    assert facts.speedup is None and facts.verdict == "cannot be told"


def test_who_can_be_asked_both_ways() -> None:
    kinds = {"foretell": {"speculative": False}, "llamacpp": {"speculative.n_max": 0}}
    for kind, switch in kinds.items():
        on, off = arms_of(replace(Endpoint.named("127.0.0.1:9"), kind=kind))
        assert (on.name, off.name, off.extra) == (ON, OFF, switch) and not on.extra
    assert [arm.name for arm in arms_of(replace(Endpoint.named("127.0.0.1:9"), kind="vllm"))] == [ON]


def test_twelve_requests_and_what_others_do() -> None:
    script = Script("vllm")
    script.metrics = 'vllm:num_requests_running{{m="x"}} 7.0\nvllm:spec_decode_num_accepted_tokens_total {accepted}\n'
    with serving(script) as url:
        endpoint = Endpoint.named(url)
        endpoint.meet()
        assert running(endpoint) == 7
        found = run_check(endpoint, items(chat=20), watch_nothing, {})
    assert len(script.asked) == 13, "one to warm up"
    assert (found.facts.requests, found.facts.others, found.facts.verdict, found.facts.cause) == (
        12,
        7,
        "cannot be told",
        "load",
    )
    assert found.facts.accepted_per_step == pytest.approx(2.0)
    assert "7 other texts were being written" in remarks(found)[0]


def test_a_server_that_refuses_is_said() -> None:
    script = Script("vllm")
    script.last = {"error": {"message": "no such model"}}
    with serving(script) as url, pytest.raises(RequestError, match="does not serve: no such model; start the server"):
        run_check(Endpoint.named(url), items(chat=20), watch_nothing, {})


# As it is typed


def test_our_own_server(capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path) -> None:
    page = tmp_path / "check.html"
    assert program.main(["bench", "check", server.url, "--html", str(page)]) == 0
    out, _ = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert told["verdict"] in ("pays", "makes no difference", "costs time", "is off")
    assert told["requests_per_second"] > 0 and told["same_text"] is True and told["errors"] == 0
    assert {row["task"] for row in told["cells"]} == set(TASKS)
    assert [row["task"] for row in told["overall"]] == ["all"] and told["overall"][0]["speedup"] == told["speedup"]
    assert all("speedup_interval" in row for row in (*told["cells"], *told["overall"]))
    assert "machine: cores" in page.read_text()
    assert "Speculation " in out and "12 requests one after the other" in out
    assert "Foretell bench: check" in page.read_text()


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["bench", "check", "http://127.0.0.1:1"]) == 2
    _, err = capsys.readouterr()
    assert "nobody answers at 127.0.0.1:1; start the server" in err and err.count("\n") == 1


def test_the_table_has_a_row_for_each_task() -> None:
    with serving(Script("somebody")) as url:
        found = run_check(Endpoint.named(url), items(chat=1), watch_nothing, {})
    assert markdown(found).splitlines()[2].startswith("| chat | 8 | ") and markdown(found).endswith("| - | - | - |")
