"""The option `draft_corpus`: paths, API keys, names of drafters, and the drafter in an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.build.draft_corpus import for_tenants, read_corpus_config
from foretell.build.engine_builder import build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft import default_drafters, drafter_names
from foretell.draft.ngram import NGramDrafter
from foretell.errors import RequestError
from foretell.server.compat_flags import check_speculation
from foretell.server.run import with_corpus_tenants
from foretell.server.service import Service, key_tenant
from foretell.vllm_config import speculation_from_vllm
from tests.draft.corpora import write
from tests.server.in_process import run_app

PROMPT = "one two three four five"
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))


def config(drafter: str = "auto", *paths: str) -> SpeculationConfig:
    return SpeculationConfig(drafter=drafter, draft_corpus=paths)


def test_a_draft_corpus_adds_its_drafter() -> None:
    assert drafter_names(config("auto", "x")) == ("ngram", "suffix", "corpus", "recycle")
    assert default_drafters(config("auto", "x")) == ("suffix", "corpus", "recycle")
    assert drafter_names(config("ngram", "x")) == ("ngram", "corpus")
    assert drafter_names(config("corpus", "x")) == ("corpus",)
    assert drafter_names(config("exit:1", "x")) == ("corpus", "exit:1")
    assert default_drafters(config("suffix+corpus", "x")) == ("suffix+corpus",)
    assert "corpus" not in drafter_names(config("auto"))
    for drafter, field in (("corpus", "--draft-corpus FOLDER"), ("ngram+corpus", "--draft-corpus FOLDER")):
        with pytest.raises(RequestError, match=field):
            drafter_names(config(drafter))
    with pytest.raises(RequestError, match="draft_corpus"):
        drafter_names(config("none", "x"))
    with pytest.raises(RequestError, match="draft_corpus"):
        check_speculation(config("none", "x"))


def test_one_path_or_several_are_accepted(tmp_path: Path) -> None:
    for given in (str(tmp_path), tmp_path, [str(tmp_path)], (tmp_path,)):
        assert SpeculationConfig(draft_corpus=given).draft_corpus == (str(tmp_path),)  # type: ignore[arg-type]
    for wrong in (3, [3]):
        with pytest.raises(RequestError, match="draft_corpus"):
            SpeculationConfig(draft_corpus=wrong)  # type: ignore[arg-type]
    for memory in (0, -1.0, float("inf")):
        with pytest.raises(RequestError, match="draft_corpus_memory"):
            SpeculationConfig(draft_corpus_memory=memory)
    assert speculation_from_vllm({"method": "suffix", "draft_corpus": ["a", "b"]}).draft_corpus == ("a", "b")


def test_paths_are_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    for wrong, words in (("missing", "No such file"), ("/dev/null", "neither a file nor a folder"), ("a\0", "null")):
        with pytest.raises(RequestError, match=f"draft_corpus.*{words}"):
            read_corpus_config(config("auto", wrong))
    (tmp_path / "link").symlink_to(tmp_path)
    found = read_corpus_config(config("auto", str(tmp_path / "link"), str(tmp_path)))
    assert found is not None and found.roots == {"": (str(tmp_path),)}, "a link that the operator names is followed"
    assert read_corpus_config(config("auto")) is None


def test_the_number_of_an_api_key_becomes_its_tenant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = config("auto", f"2={tmp_path}", f"1={tmp_path}", str(tmp_path))
    found = read_corpus_config(with_corpus_tenants(given, ("anna", "berta")))
    assert found is not None and set(found.roots) == {key_tenant("anna"), key_tenant("berta"), ""}
    assert "response times can reveal" in caplog.text, "shared by two keys"
    caplog.clear()
    with_corpus_tenants(config("auto", f"2={tmp_path}"), ("anna", "berta"))
    with_corpus_tenants(config("auto", str(tmp_path)), ("anna",))
    assert not caplog.text
    for wrong, keys in ((f"3={tmp_path}", ("a", "b")), (f"0={tmp_path}", ("a",)), (f"1={tmp_path}", ())):
        with pytest.raises(RequestError, match="is no number of an --api-key"):
            with_corpus_tenants(config("auto", wrong), keys)
    with pytest.raises(RequestError, match="which only foretell serve has"):
        read_corpus_config(config("auto", f"1={tmp_path}"))
    assert for_tenants(["./1=x", "a=b"], ["t"]) == ("./1=x", "a=b"), "names of folders"


@pytest.fixture
def letters(tiny_folder: Path) -> list[int]:
    """Tokens of single letters: text of them is mostly encoded as it was generated."""
    tokenizer = LLM(tiny_folder, drafter="none", quiet=True).tokenizer
    return [token for letter in "bcdfgjkmpqvxz" for token in tokenizer.encode(letter, add_special=False)]


def plain_output(model: Path, letters: list[int]) -> Any:
    params = replace(PARAMS, allowed_token_ids=letters)
    (output,) = LLM(model, drafter="none", quiet=True).generate(PROMPT, params)
    return output.outputs[0]


def test_an_output_that_is_in_a_file_takes_few_steps(tiny_folder: Path, tmp_path: Path, letters: list[int]) -> None:
    expected, params = plain_output(tiny_folder, letters), replace(PARAMS, allowed_token_ids=letters)
    folder = write(tmp_path / "files/a.txt", f"{PROMPT}{expected.text}").parent
    llm = LLM(tiny_folder, drafter="suffix", draft_corpus=folder, num_speculative_tokens=8, quiet=True)
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].token_ids == expected.token_ids
    assert output.speculation.by_drafter["corpus"].accepted > 0
    (without,) = llm.generate(PROMPT, params, speculation=SpeculationChoice(drafter="suffix"))
    assert without.outputs[0].token_ids == expected.token_ids and "corpus" not in without.speculation.by_drafter
    (alone,) = llm.generate(PROMPT, params, speculation=SpeculationChoice(drafter="corpus"))
    assert set(alone.speculation.by_drafter) == {"corpus"}


def test_a_drafter_object_cannot_have_files(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="draft_corpus"):
        LLM(tiny_folder, drafter=NGramDrafter(), draft_corpus=tmp_path, quiet=True)


def test_only_the_tenant_of_a_folder_drafts_from_it(tiny_folder: Path, tmp_path: Path, letters: list[int]) -> None:
    text = plain_output(tiny_folder, letters).text
    folder = write(tmp_path / "files/a.txt", f"{PROMPT}{text}").parent
    given = SpeculationConfig(drafter="corpus", draft_corpus=(f"1={folder}",), num_speculative_tokens=8)
    keys = ("anna", "berta")
    assembly = build_engine(EngineConfig(model=str(tiny_folder)), with_corpus_tenants(given, keys))

    async def scenario(service: Service, client: httpx.AsyncClient) -> None:
        async def drafted(key: str, **fields: Any) -> int:
            body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
            body["allowed_token_ids"] = letters
            reply = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == text
            service.engine.deliver_pending()
            return service.metrics.totals.drafters.get("corpus", (0, 0))[0]

        assert await drafted("berta") == 0
        first = await drafted("anna")
        assert first > 0
        assert await drafted("berta") == await drafted("berta", cache_salt="anna") == first
        assert await drafted("anna", cache_salt="any") > first
        metrics = (await client.get("/metrics", headers={"Authorization": "Bearer anna"})).text
        assert 'drafter="corpus"' in metrics
        info = (await client.get("/server_info", headers={"Authorization": "Bearer anna"})).text
        assert str(folder) not in info and key_tenant("anna") not in info + metrics

    run_app(assembly, scenario, api_key=keys)


def test_no_request_can_name_files(tiny_folder: Path) -> None:
    assembly = build_engine(EngineConfig(model=str(tiny_folder)), SpeculationConfig(drafter="suffix"))
    named = ({"draft_corpus": ["/etc"]}, {"drafter": "corpus"}, {"drafter": "corpus:/etc"}, {"drafter": "/etc"})

    async def scenario(service: Service, client: httpx.AsyncClient) -> None:
        for speculative in named:
            reply = await client.post("/v1/completions", json={"prompt": "a", "speculative": speculative})
            assert reply.status_code == 400, (speculative, reply.text)

    run_app(assembly, scenario)


def test_tool_results_and_earlier_turns_are_drafted_at_once(tiny_folder: Path) -> None:
    """The end of a chat with a tool result: the first draft of `suffix` copies from it, and so does the next turn's."""
    llm = LLM(tiny_folder, drafter="suffix", num_speculative_tokens=8, quiet=True)
    result = "She sells sea shells by the sea shore. The quick brown fox."
    turns = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]},
        {"role": "tool", "content": result},
    ]
    answer = llm.tokenizer.encode(result, add_special=False)

    def force(output: list[int], scores: Any) -> Any:
        scores.fill_(-float("inf"))
        scores[answer[len(output)]] = 0.0
        return scores

    params = replace(PARAMS, max_tokens=len(answer), logits_processors=(force,))
    for earlier in ([], [{"role": "assistant", "content": result}, {"role": "user", "content": "Again."}]):
        (output,) = llm.chat([*turns, *earlier], params)
        assert output.outputs[0].text == result
        assert output.speculation.accepted > 0.5 * len(answer)
        assert output.speculation.steps < 0.5 * len(answer)
        llm.engine.drafter.drafters["suffix"].store._generations.clear()  # not from the finished output


def test_the_config_of_a_server_may_have_several_folders(tmp_path: Path) -> None:
    from foretell.cli.serve import read_file

    file = write(tmp_path / "server.yaml", json.dumps({"draft-corpus": ["./a", "1=./b"]}))
    assert read_file(file).draft_corpus == ["./a", "1=./b"]
