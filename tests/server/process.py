"""A real server on loopback, in a process of its own, with a model that loads in a blink."""

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
# Each step takes a while as long as a file is there: whoever looks at a text from outside then finds it unfinished.
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
    """The tiny model with room for a chat, and a template that knows tools and thoughts."""
    write_tiny_folder(path, seed)
    _change(path / "config.json", max_position_embeddings=CONTEXT)
    _change(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class ServerProcess:
    """Started with flags of one's own on a free port; stopped by SIGTERM."""

    def __init__(self, model: Path | None, *flags: str, slowed: Path | None = None) -> None:
        """`model` is None where a flag names it. `slowed`: a file that need not be there, for `slowly`."""
        self.flags, self._sign = flags, slowed
        self.log = Path(tempfile.mkstemp(prefix="foretell-", suffix=".log")[1])
        named = [] if model is None else [str(model)]
        command = COMMAND if slowed is None else [sys.executable, "-c", SLOWED, str(slowed), "serve"]
        words = [*command, *named, "--port", "0", "--served-model-name", "tiny", "--threads", "1", *flags]
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
        """Within, a text takes many seconds: what is done about it comes before its end, however busy the machine."""
        assert self._sign is not None, "it was not started to be slowed"
        self._sign.touch()
        try:
            yield
        finally:
            self._sign.unlink()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Ask it to stop and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(TIMEOUT)
        finally:
            self.process.kill()  # one that does not stop is not left behind
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        return code

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """The reply's JSON; the status must be as expected."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels, the model's left out."""
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
