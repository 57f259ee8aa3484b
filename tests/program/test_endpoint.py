"""Programs against a server: what it refuses, what it cannot, and who leaves early."""

from __future__ import annotations

import pytest

from foretell import SpeculationChoice
from foretell import program as fp
from foretell.program.endpoint import TRIES, completion_body
from foretell.program.settings import Settings
from foretell.structured_output import GrammarSpec
from tests.program.stub import BREAKS, FULL, RIGHT, stub
from tests.program.test_errors import LONG_GEN
from tests.program.test_one_batch import tell
from tests.server.process import ServerProcess
from tests.waiting import wait_for


def test_what_the_server_refuses_names_the_line(endpoint: fp.RuntimeEndpoint) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The" + fp.gen("x", max_tokens=100_000)

    with pytest.raises(fp.ProgramError, match=r"test_endpoint.py:\d+ in wrong: max_tokens: 100000 is more than"):
        wrong(backend=endpoint)


def test_no_server_is_told_with_what_would_do() -> None:
    with (
        fp.RuntimeEndpoint("http://127.0.0.1:9/v1/") as nobody,
        pytest.raises(
            fp.ProgramError, match="no server answers at http://127.0.0.1:9; start one with foretell serve --port 9"
        ),
    ):
        tell("fox", backend=nobody)


def test_another_kind_of_server_is_told(server: ServerProcess) -> None:
    with fp.RuntimeEndpoint(server.url + "/elsewhere") as wrong, pytest.raises(fp.ProgramError, match="in tell: "):
        tell("fox", backend=wrong)


def test_a_key_is_shown() -> None:
    with stub(RIGHT) as found, fp.RuntimeEndpoint(found.url, api_key="secret") as endpoint:
        assert tell("fox", backend=endpoint)["x"] == " jumps"
        assert found.keys == ["Bearer secret"]


def test_a_full_server_is_asked_again() -> None:
    with stub(FULL, FULL, RIGHT) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        assert tell("fox", backend=endpoint).get_meta_info("x")["seed"] == 7
        assert len(found.keys) == 3


def test_a_server_that_stays_full_is_given_up() -> None:
    with stub(FULL) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        with pytest.raises(fp.ProgramError, match="too many texts wait"):
            tell("fox", backend=endpoint)
        assert len(found.keys) == TRIES


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_breaks_off_is_told(stream: bool) -> None:
    with stub(BREAKS) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        state = (
            tell.run_batch([{"of": "fox"}], backend=endpoint)[0]
            if not stream
            else tell.run("fox", backend=endpoint, stream=True)
        )
        assert "broke off" in str(state.error())
    with stub((200, 'data: {"choices": []}\n\n')) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        assert "broke off" in str(tell.run("fox", backend=endpoint, stream=True).error())


def test_cancelling_frees_the_servers_pages(server: ServerProcess, endpoint: fp.RuntimeEndpoint) -> None:
    @fp.function
    def long(s: fp.ProgramState) -> None:
        s += "The"
        forks = s.fork(3)
        forks += fp.gen("x", **LONG_GEN, speculation=SpeculationChoice(enabled=False))
        forks.join()

    def load(name: str) -> int:
        return int(server.http.get("/server_info").json()["internal_states"][0][name])

    written = server.metrics()["foretell:generation_tokens_total"]
    with server.slowly():
        state = long.run(backend=endpoint, stream=True)
        wait_for(lambda: load("running") == 3)
        state.cancel()
        assert isinstance(state.error(), fp.Cancelled)
        wait_for(lambda: load("running") == 0 and load("pages_held") == 0)
    assert server.metrics()["foretell:generation_tokens_total"] - written < 3 * LONG_GEN["max_tokens"]


def test_what_a_generation_says_reaches_the_server(server: ServerProcess, endpoint: fp.RuntimeEndpoint) -> None:
    choice = SpeculationChoice(drafter="ngram", max_draft=3, rule="match", prediction="The quick brown fox")
    settings = Settings.read({"temperature": 0, "speculation": choice, "grammar": GrammarSpec.json_object()})
    assert completion_body([1], settings) == {
        "prompt": [1],
        "max_tokens": 128,
        "temperature": 0,
        "structured_outputs": {"json_object": True},
        "speculative": {"enabled": True, "drafter": "ngram", "max_draft": 3, "rule": "match"},
        "prediction": {"type": "content", "content": "The quick brown fox"},
    }
    thresholds = SpeculationChoice(rule="confidence", acceptance_threshold=(0.9, 0.2))
    body = completion_body("x", Settings.read({"speculation": thresholds}))
    assert body["speculative"]["acceptance_threshold_lower"] == 0.2

    @fp.function
    def off(s: fp.ProgramState) -> None:
        s += "She sells sea shells. She sells" + fp.gen("x", 20, speculation=SpeculationChoice(enabled=False))
        s += fp.gen("y", 8, grammar=GrammarSpec.choice(["fox", "dog"]), ignore_eos=True)

    state = off(backend=endpoint)
    assert state.get_meta_info("x")["drafted"] == 0 and state["y"] in ("fox", "dog")
