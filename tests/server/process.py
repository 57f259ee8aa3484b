"""A server process on loopback with a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.folder import write_tiny_folder
from tests.waiting import TIMEOUT

COMMAND = [sys.executable, "-m", "foretell", "serve"]
# Slows every step down while a file exists, so that a test can observe an unfinished sequence.
SLOWED = """
import sys, time
from pathlib import Path
from foretell.cli.main import main
from foretell.engine.engine import Engine

step, sign = Engine.step, Path(sys.argv.pop(1))

def slowly(engine):
    until = time.monotonic() + 0.1
    while sign.exists() and time.monotonic() < until:
        time.sleep(0.001)
    return step(engine)

Engine.step = slowly
sys.exit(main())
"""
ADDRESS = re.compile(r"http://\S+:\d+")
MODEL_LABEL = re.compile(r',model_name="[^"]*"|model_name="[^"]*",?')
CONTEXT = 1024
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }} as <tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{# </think> #}{% endif %}"
)


def write_server_folder(path: Path, seed: int = 0) -> Path:
    """Create the tiny model with a chat template for tools and reasoning."""
    write_tiny_folder(path, seed)
    _change(path / "config.json", max_position_embeddings=CONTEXT)
    _change(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class ServerProcess:
    """A server with the given flags on a free port; stopped by SIGTERM."""

    def __init__(
        self, model: Path | None, *flags: str, slowed: Path | None = None, command: list[str] | None = None
    ) -> None:
        """`model` is None if a flag names it. `slowed`: path of the file that `slowly` creates.

        `command` starts the server instead of `foretell serve`.
        """
        self.flags, self._sign = flags, slowed
        self.log = Path(tempfile.mkstemp(prefix="foretell-", suffix=".log")[1])
        named = [] if model is None else [str(model)]
        if slowed is not None:
            command = [sys.executable, "-c", SLOWED, str(slowed), "serve"]
        words = [*(command or COMMAND), *named, "--port", "0", "--served-model-name", "tiny", "--threads", "1", *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment())
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        found = ADDRESS.search(self.greeting)
        if found is None:
            self.process.stdout.close()
            raise AssertionError(f"it left with {self.process.wait(TIMEOUT)}: {self.greeting} {self.log.read_text()}")
        self.url = found[0]
        each = httpx.Limits(max_keepalive_connections=0)  # one that rests may be closed the moment it is used
        self.http = httpx.Client(base_url=self.url, timeout=2 * TIMEOUT, limits=each)

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """Slow every step down, so that a request is still running when the test acts on it."""
        assert self._sign is not None, "it was not started to be slowed"
        self._sign.touch()
        try:
            yield
        finally:
            self._sign.unlink()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(TIMEOUT)
        finally:
            self.process.kill()  # a server that does not stop must not outlive the test
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        return code

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """Return the response's JSON after checking the status."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name and labels, without the model's."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {MODEL_LABEL.sub("", name).replace("{}", ""): float(value) for name, value in pairs}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self.log.unlink()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
