"""Programs on a server: refused requests, failures and cancellation."""

from __future__ import annotations

import pytest

from foretell import SpeculationChoice
from foretell import program as fp
from foretell.program.endpoint import MAX_TRIES, completion_body
from foretell.program.settings import GenSettings
from foretell.structured_output import GrammarSpec
from tests.program.stub import CLOSES, COMPLETED, TOO_MANY_REQUESTS, stub
from tests.program.test_errors import LONG_GEN
from tests.program.test_one_batch import continue_text
from tests.server.process import ServerProcess
from tests.waiting import wait_for


def test_a_refused_request_names_the_line(endpoint: fp.RuntimeEndpoint) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The" + fp.gen("x", max_tokens=4, allowed_token_ids=[10**6])

    with pytest.raises(fp.ProgramError, match=r"test_endpoint.py:\d+ in wrong: allowed_token_ids: "):
        wrong(backend=endpoint)


def test_a_missing_server_is_reported_with_a_remedy() -> None:
    with (
        fp.RuntimeEndpoint("http://127.0.0.1:9/v1/") as endpoint,
        pytest.raises(
            fp.ProgramError, match="no server answers at http://127.0.0.1:9; start one with foretell serve --port 9"
        ),
    ):
        continue_text("fox", backend=endpoint)


def test_another_kind_of_server_is_reported(server: ServerProcess) -> None:
    with (
        fp.RuntimeEndpoint(server.url + "/elsewhere") as wrong,
        pytest.raises(fp.ProgramError, match="in continue_text: "),
    ):
        continue_text("fox", backend=wrong)


def test_the_api_key_is_sent() -> None:
    with stub(COMPLETED) as found, fp.RuntimeEndpoint(found.url, api_key="secret") as endpoint:
        assert continue_text("fox", backend=endpoint)["x"] == " jumps"
        assert found.keys == ["Bearer secret"]


def test_a_request_is_retried_after_429() -> None:
    with stub(TOO_MANY_REQUESTS, TOO_MANY_REQUESTS, COMPLETED) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        assert continue_text("fox", backend=endpoint).get_meta_info("x")["seed"] == 7
        assert len(found.keys) == 3


def test_retries_are_limited() -> None:
    with stub(TOO_MANY_REQUESTS) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        with pytest.raises(fp.ProgramError, match="too many requests are waiting"):
            continue_text("fox", backend=endpoint)
        assert len(found.keys) == MAX_TRIES


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_is_reported(stream: bool) -> None:
    with stub(CLOSES) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        state = (
            continue_text.run_batch([{"of": "fox"}], backend=endpoint)[0]
            if not stream
            else continue_text.run("fox", backend=endpoint, stream=True)
        )
        assert f"the server at {found.url} failed" in str(state.error())
    with stub((200, 'data: {"choices": []}\n\n')) as found, fp.RuntimeEndpoint(found.url) as endpoint:
        assert "closed the connection early" in str(continue_text.run("fox", backend=endpoint, stream=True).error())


def test_cancelling_frees_the_servers_pages(server: ServerProcess, endpoint: fp.RuntimeEndpoint) -> None:
    @fp.function
    def long(s: fp.ProgramState) -> None:
        s += "The"
        forks = s.fork(3)
        forks += fp.gen("x", **LONG_GEN, speculation=SpeculationChoice(enabled=False))
        forks.join()

    def load(name: str) -> int:
        return int(server.http.get("/server_info").json()["internal_states"][0][name])

    generated = server.metrics()["foretell:generation_tokens_total"]
    with server.slowly():
        state = long.run(backend=endpoint, stream=True)
        wait_for(lambda: load("running") == 3)
        state.cancel()
        assert isinstance(state.error(), fp.Cancelled)
        wait_for(lambda: load("running") == 0 and load("pages_held") == 0)
    assert server.metrics()["foretell:generation_tokens_total"] - generated < 3 * LONG_GEN["max_tokens"]


def test_settings_of_a_generation_reach_the_server(server: ServerProcess, endpoint: fp.RuntimeEndpoint) -> None:
    choice = SpeculationChoice(drafter="ngram", max_draft=3, rule="match", prediction="The quick brown fox")
    settings = GenSettings.read({"temperature": 0, "speculation": choice, "grammar": GrammarSpec.json_object()})
    assert completion_body([1], settings) == {
        "prompt": [1],
        "max_tokens": 128,
        "temperature": 0,
        "structured_outputs": {"json_object": True},
        "speculative": {"enabled": True, "drafter": "ngram", "max_draft": 3, "rule": "match"},
        "prediction": {"type": "content", "content": "The quick brown fox"},
    }
    thresholds = SpeculationChoice(rule="confidence", acceptance_threshold=(0.9, 0.2))
    body = completion_body("x", GenSettings.read({"speculation": thresholds}))
    assert body["speculative"]["acceptance_threshold_lower"] == 0.2

    @fp.function
    def off(s: fp.ProgramState) -> None:
        s += "She sells sea shells. She sells" + fp.gen("x", 20, speculation=SpeculationChoice(enabled=False))
        s += fp.gen("y", 8, grammar=GrammarSpec.choice(["fox", "dog"]), ignore_eos=True)

    state = off(backend=endpoint)
    assert state.get_meta_info("x")["drafted"] == 0 and state["y"] in ("fox", "dog")
