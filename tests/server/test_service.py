"""The service in one process: health, grammars after reasoning, tenants, seeds, logs."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.engine.async_engine import AsyncEngine
from foretell.sampling_params import SamplingParams
from foretell.server.background_tasks import StatsLogger
from foretell.server.chat_grammar import ChatGrammars
from foretell.server.config import ServerConfig
from foretell.server.middleware import ApiKeys
from foretell.server.openai.chat_requests import ChatCompletionRequest, ChatMessageParam, FunctionDefinition, Tool
from foretell.server.openai.requests import GenerationRequest
from foretell.server.parsers.tools import TOOL_PARSERS
from foretell.server.parsers.tools.grammar import FORMATS, call_format
from foretell.server.parsers.tools.lark import LarkTokens
from foretell.server.preprocess import ClientContext, RequestPreprocessor
from foretell.server.request_params import SHARED_PARAMS
from foretell.server.run import JsonFormatter
from foretell.server.service import GRAMMAR_THREADS, Service, tenant
from foretell.structured_output import GrammarSpec
from foretell.tokenizer.reasoning_tags import THINK
from foretell.types import ScheduledSequence
from tests.server.in_process import run_app

HELLO = [{"role": "user", "content": "Hello"}]


def test_health_reports_a_stuck_step(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    release, entered, now = threading.Event(), threading.Event(), [0.0]
    step = assembly.engine.step

    def stuck() -> Any:
        entered.set()
        release.wait(60)
        return step()

    monkeypatch.setattr(assembly.engine, "step", stuck)
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("foretell.engine.async_engine.time", clock)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        asked = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 2}))
        assert await asyncio.to_thread(entered.wait, 60)
        now[0] = 9.0
        assert (await client.get("/health")).status_code == 200
        now[0] = 11.0
        ill = await client.get("/health")
        assert ill.status_code == 503 and "has taken 11 seconds" in ill.json()["reason"]
        release.set()
        assert (await asked).status_code == 200
        assert (await client.get("/health")).status_code == 200

    run_app(assembly, play, watchdog=10.0)


def test_health_reports_an_ended_thread(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncEngine, "_run", lambda engine: None)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        service.engine._thread.join(60)
        ill = await client.get("/health")
        assert ill.status_code == 503 and "has ended" in ill.json()["reason"]

    run_app(assembly, play)


def test_a_failed_step_is_reported_to_its_client_only(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 500, or as the last event of a stream; other requests are not affected."""
    forward = assembly.engine.runner.forward

    def broken(shares: list[ScheduledSequence], *values: Any) -> Any:
        if any(share.seq.request.max_tokens == 7 and share.seq.num_output_tokens == 3 for share in shares):
            raise RuntimeError("planted")
        return forward(shares, *values)

    good = {"prompt": "a b", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    bad = good | {"max_tokens": 7, "speculative": False}

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        expected = (await client.post("/v1/completions", json=good)).json()["choices"]
        monkeypatch.setattr(assembly.engine.runner, "forward", broken)
        bodies = (good, bad, good, bad | {"stream": True}, good)
        first, lost, second, streamed, third = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for body in bodies)
        )
        assert all(reply.json()["choices"] == expected for reply in (first, second, third))
        assert lost.status_code == 500 and lost.json()["error"]["code"] == "step_failed"
        assert streamed.status_code == 200
        *chunks, event, done = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
        assert len(chunks) == 3 and json.loads(event)["error"]["code"] == "step_failed" and done == "[DONE]"
        assert "planted" not in lost.text + streamed.text, "what is inside stays inside"
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json=good)).json()["choices"] == expected

    run_app(assembly, play)


def test_a_grammar_that_compiles_for_too_long_is_refused(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(assembly.grammars, "compile", lambda spec: release.wait(60))

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a+"})
        assert reply.status_code == 400 and "seconds to compile" in reply.json()["error"]["message"]
        release.set()

    run_app(assembly, play, grammar_timeout=0.05)


def test_the_grammars_of_others_cost_a_grammar_no_time(assembly: Assembly) -> None:
    """A cached grammar needs no thread, and the timeout of another starts when it compiles."""
    release = threading.Event()

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        known, other = ({"prompt": "a", "guided_choice": [word]} for word in ("known", "other"))
        assert (await client.post("/v1/completions", json=known)).status_code == 200
        busy = [service._grammar_pool.submit(release.wait, 60) for _ in range(GRAMMAR_THREADS)]
        assert (await client.post("/v1/completions", json=known)).status_code == 200
        waiting = asyncio.ensure_future(client.post("/v1/completions", json=other))
        service.config.__dict__["grammar_timeout"] = 0.05
        while not service.num_preprocessing:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        assert not waiting.done() and service.num_preprocessing == 1
        service.config.__dict__["grammar_timeout"] = 60.0  # it compiles on a clock that begins now
        release.set()
        assert (await waiting).status_code == 200 and all(each.result(60) for each in busy)

    run_app(assembly, play, grammar_timeout=60.0)


def test_an_answer_in_a_grammar_may_be_thought_about_first(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 40, "seed": 1, "guided_choice": ["yes", "no"], "thinking_budget": 5}
        body["chat_template_kwargs"] = {"think": True}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert message["content"] in ("yes", "no") and message["reasoning_content"]

    run_app(assembly, play)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec.choice(["yes"]), "yes", "maybe"),
        (GrammarSpec.regex("a/b"), "a/b", "ab"),
        (GrammarSpec.json_object(), '{"a": 1}', "[1]"),
        (GrammarSpec.json_schema({"const": 3}), "3", "4"),
    ],
)
def test_a_grammar_after_reasoning(assembly: Assembly, spec: GrammarSpec, good: str, bad: str) -> None:
    grammar = ChatGrammars(LarkTokens(), THINK, in_reasoning=True).answer(spec)
    assert accepts(assembly, grammar, f"whatever < it takes</think>\n\n{good}")
    assert not accepts(assembly, grammar, f"whatever</think>\n\n{bad}")


@pytest.mark.parametrize(("family", "skips"), [("mistral", False), ("hermes", True)])
def test_tool_call_tags_that_are_special_tokens_are_kept(assembly: Assembly, family: str, skips: bool) -> None:
    preprocessor = RequestPreprocessor(assembly, ServerConfig(tool_call_parser=family))
    tools = [Tool(type="function", function=FunctionDefinition(name="f"))]
    messages = [ChatMessageParam(role="user", content="Hello")]
    with_tools = preprocessor.preprocess_chat(
        ChatCompletionRequest(messages=messages, tools=tools), ClientContext("a", "")
    )
    assert with_tools.requests[0].params.skip_special_tokens is skips
    assert (
        preprocessor.preprocess_chat(ChatCompletionRequest(messages=messages), ClientContext("b", ""))
        .requests[0]
        .params.skip_special_tokens
    )


def test_the_server_gives_seeds_where_it_has_one(assembly: Assembly) -> None:
    outputs: list[str] = []

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            reply = await client.post("/v1/completions", json={"prompt": "a b", "temperature": 1.0})
            outputs.append(reply.json()["choices"][0]["text"])

    run_app(assembly, play, seed=5)
    run_app(assembly, play, seed=5)
    assert outputs[:2] == outputs[2:] and outputs[0] != outputs[1]


def test_each_prompt_of_a_request_has_a_seed_of_its_own(assembly: Assembly) -> None:
    found: list[list[int]] = []

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for body in ({"n": 3}, {"n": 3, "seed": 9}, {"prompt": "a b"}):
            asked = {"prompt": ["a b"] * 4, "max_tokens": 1, "temperature": 1.0, **body}
            reply = (await client.post("/v1/completions", json=asked)).json()
            found.append(reply["speculation"]["seeds"])

    run_app(assembly, play, seed=5)
    run_app(assembly, play, seed=5)
    ours, given, alone = found[:3]
    assert len(set(ours)) == 12 and found[3:] == found[:3]
    assert given == given[:3] * 4 and given[0] == 9, "a seed in the body has the same meaning for every prompt"
    assert service_seeds(5, 3)[0::2] == [ours[0], alone[0]], "the first prompt has the request's own"


def service_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of a server's first requests."""
    digests = [hashlib.sha256(f"{seed} {number}".encode()).digest()[:7] for number in range(count)]
    return [int.from_bytes(each) for each in digests]


def test_origins_that_are_named_get_leave(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for origin, leave in (("https://a.example", True), ("https://b.example", False)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            reply = await client.options("/v1/completions", headers=headers)
            assert (reply.headers.get("access-control-allow-origin") == origin) == leave

    run_app(assembly, play, cors_origin=("https://a.example",), api_key=("k",))


def test_tenants_differ_by_key_and_salt() -> None:
    kinds = [tenant(key, salt) for key in ("", "a", "b") for salt in (None, "s", "t")]
    assert len(set(kinds)) == len(kinds) and tenant("a", "s") == tenant("a", "s")
    assert tenant("ab", "c") != tenant("a", "bc"), "a key and a salt do not run together"


def test_the_server_starts_without_torch() -> None:
    """Invalid flags and ports in use fail at once."""
    code = "import sys, foretell.server.run, foretell.cli.serve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


UNPICKLES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def risks(source: str) -> list[str]:
    """Return the calls of a module that could run code from a file."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNPICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in (
                "torch.load",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
                "__import__",
                "eval",
                "exec",
            ):
                found.append(called)
            found += ["allow_pickle" for word in node.keywords if word.arg == "allow_pickle"]
    return found


def test_nothing_is_unpickled() -> None:
    """Loading a model must not run code that came with it."""
    for bad in ("from pickle import loads", "import os, pickle", "x = torch.load(f)", "np.load(f, allow_pickle=True)"):
        assert risks(bad), bad
    package = Path(__file__).parents[2] / "foretell"
    found = {path.name: what for path in package.rglob("*.py") if (what := risks(path.read_text()))}
    assert not found


def test_no_field_of_sampling_is_forgotten_on_the_way_to_the_engine() -> None:
    """Sampling parameters that are not copied by name are set explicitly."""
    by_name, fields = set(SHARED_PARAMS), set(SamplingParams.__dataclass_fields__)
    overridden = {"max_tokens", "logprobs", "prompt_logprobs", "thinking_budget", "structured_outputs"}
    only_in_python = {"logits_processors"}
    assert by_name | overridden | only_in_python == fields and by_name.isdisjoint(overridden)
    assert by_name <= set(GenerationRequest.model_fields)


def test_keys_that_fit() -> None:
    keys = ApiKeys(("right", "also"))
    assert keys.accepts("right") and keys.accepts("also") and not keys.accepts("") and not keys.accepts("righ")
    assert ApiKeys(()).accepts("") and ApiKeys(()).accepts("anything")


def test_a_log_line_covers_the_time_since_the_last(assembly: Assembly, caplog: pytest.LogCaptureFixture) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reporter = StatsLogger(service)
        reporter.report(10)
        assert not caplog.records, "nothing happened"
        await client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 20, "ignore_eos": True})
        reporter.report(10)
        reporter.report(10)

    with caplog.at_level(logging.INFO, "foretell"):
        run_app(assembly, play)
    lines = [record for record in caplog.records if "output tokens/s" in record.getMessage()]
    assert len(lines) == 1 and "2.0 output tokens/s" in lines[0].getMessage()
    assert json.loads(JsonFormatter().format(lines[0]))["tokens_per_second"] == 2.0


STRICT = FunctionDefinition(
    name="f",
    parameters={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    strict=True,
)


def accepts(assembly: Assembly, spec: GrammarSpec | None, text: str) -> bool:
    assert spec is not None
    matcher = assembly.grammars.compile(spec).matcher(())
    tokens = assembly.tokenizer.encode(text, add_special=False)
    return matcher.count_allowed(tokens) == len(tokens)


def test_strict_tools_are_kept_to_wherever_they_are_called(assembly: Assembly) -> None:
    grammar = ChatGrammars(LarkTokens()).strict(FORMATS["hermes"], [STRICT, FunctionDefinition(name="g")])
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    for good in ("any <b> words", "Well.\n" + call.format("f", '{"x": 1}') + " and " + call.format("g", '{"y": []}')):
        assert accepts(assembly, grammar, good), good
    for bad in (call.format("f", '{"x": "one"}'), call.format("h", "{}"), "a <tool_call> b"):
        assert not accepts(assembly, grammar, bad), bad
    assert ChatGrammars(LarkTokens()).strict(FORMATS["llama3"], [STRICT]) is None, "its calls have no start tag"


FORCED = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"x": 1}}',
    "mistral": '[{"name": "f", "arguments": {"x": 1}}]',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("family", FORCED)
def test_a_forced_call_is_parsed(assembly: Assembly, family: str) -> None:
    functions, text = [STRICT, FunctionDefinition(name="g")], FORCED[family]
    grammar = ChatGrammars(LarkTokens()).calls(call_format(family, None, parallel=True), functions, parallel=True)
    assert accepts(assembly, grammar, text) and not accepts(assembly, grammar, text.replace("1", '"one"'))
    reader = TOOL_PARSERS[family](frozenset({"f", "g"}))
    said = [*reader.feed(text), *reader.finish()]
    assert [(part.kind, part.text) for part in said] == [("call", "f"), ("arguments", '{"x": 1}')]
