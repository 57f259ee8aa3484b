"""Pages of help: overview, common options first, examples that parse, and short messages for unknown flags."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from foretell.cli.command_table import COMMANDS, EXAMPLES, GROUPS
from foretell.cli.help import Parser
from foretell.cli.main import build_parser, main, parse
from foretell.train.settings import KINDS

MANY = 28  # options on a short page: about twenty common ones, and those of the command itself


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(list(words))
    assert not leaving.value.code
    return capsys.readouterr().out


def pages() -> dict[str, Parser]:
    """Return the parser of every page, subcommands included."""
    _, commands = build_parser()
    kinds = next(action for action in commands["train"]._actions if action.dest == "kind").choices
    assert isinstance(kinds, dict)
    return commands | {f"train {kind}": parser for kind, parser in kinds.items()}


def test_the_program_alone_prints_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys)
    assert shown == help_of(capsys, "--help")
    assert all(f"  {name} " in shown for group in GROUPS.values() for name in group)
    assert shown == help_of(capsys, "help")
    assert len(shown.splitlines()) < 50 and all(len(line) <= 80 for line in shown.splitlines())


def test_help_is_also_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys, "help", "plan", "fleet") == help_of(capsys, "plan", "fleet", "--help")


@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_command_with_subcommands_alone_lists_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    shown = capsys.readouterr().out
    assert shown == help_of(capsys, command, "--help")
    assert all(word in shown for word in (KINDS if command == "train" else ("offline", "compare", "never-slower")))


def test_every_page_has_two_examples_and_few_options() -> None:
    for name, parser in pages().items():
        shown = parser.format_help()
        assert len(EXAMPLES[name]) == 2 and all(f"foretell {each}\n" in shown for each in EXAMPLES[name]), name
        assert all(len(f"  foretell {each}") <= 80 for each in EXAMPLES[name]), name
        assert parser.description and parser.description[0].isupper(), name
        options = [line for line in shown.splitlines() if line.startswith("  -")]
        assert len(options) <= MANY, f"{name}: {len(options)}"
        assert shown.splitlines()[0].startswith(f"usage: foretell {name}")
        assert len(shown.splitlines()[0]) <= 80, "the usage is one short line"


@pytest.mark.parametrize("example", [each for examples in EXAMPLES.values() for each in examples])
def test_every_example_is_accepted(example: str) -> None:
    words = shlex.split(example)
    args = parse(words)
    assert callable(args.run) and (words[0] in COMMANDS)


def test_help_all_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    short, full = help_of(capsys, "serve", "--help"), help_of(capsys, "serve", "--help-all")
    assert "--speculative-algorithm" not in short and "--speculative-algorithm" in full
    assert "more options: foretell serve --help-all" in short and "--help-all" not in full
    assert len(full.splitlines()) > 2 * len(short.splitlines())


def test_plan_and_plan_fleet_have_their_own_pages(capsys: pytest.CaptureFixture[str]) -> None:
    plan, fleet = help_of(capsys, "plan", "--help"), help_of(capsys, "plan", "fleet", "--help")
    assert "--batch" in plan and "--rate" not in plan
    assert "--rate" in fleet and "--batch" not in fleet
    eagle, medusa = (help_of(capsys, "train", kind, "--help") for kind in ("eagle", "medusa"))
    assert "EAGLE-3" in eagle and "Medusa" in medusa and "--data" in eagle


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prot", "1"], "there is no option --prot; did you mean '--port'?"),
        (["generate", "hi", "--wholly-unknown"], "there is no option --wholly-unknown; see"),
        (["generate", "hi", "--enable-metrix"], "there is no option --enable-metrix; see"),
        (["bench", "load", "http://127.0.0.1:8000", "more"], "unexpected 'more'"),
        (["bench", "ofline"], "BENCH: 'ofline' is not known; did you mean 'offline'?"),
        (["train", "lion"], "KIND: 'lion' is not known; known: block, distill"),
        (["export", "x", "--format", "eagle2"], "--format: 'eagle2' is not known; did you mean 'eagle3'?"),
        (["generate", "hi", "--max-tokens", "abc"], "foretell: --max-tokens: 'abc' is not an integer; see"),
        (["generate", "hi", "--temperature", "warm"], "--temperature: 'warm' is not a number; see"),
        (["generate", "hi", "--max-tokens"], "foretell: --max-tokens: expected one argument; see"),
        (["sevre"], "did you mean 'serve'?"),
        (["create"], "there is no command 'create'; see"),
        (["cp", "a", "b"], "there is no command 'cp'; see"),
        (["stop", "m"], "kill the PID that 'foretell ps' shows"),
        (["generate", "hi", "--ctx-size", "9"], "--ctx-size is an option of foretell serve; here: --max-model-len"),
        (["generate", "hi", "--port", "1"], "--port is an option of foretell serve; see"),
        (["generate", "hi", "--enforce-eager"], "is an option of foretell serve, which ignores it; leave it out"),
        (["generate", "hi", "-n", "20"], "there is no option -n; see"),
        (["generate", "hi", "-tb", "2"], "-tb is an option of foretell serve, which ignores it; leave it out"),
        (["generate", "hi", "--grammar", "x"], "there is no option --grammar; see"),
        (["demo", "--max-tokens", "3"], "there is no option --max-tokens; see"),
        (["list", "--format", "json"], "there is no option --format; see"),
        (["plan", "--verbose"], "there is no option --verbose; see"),
    ],
)
def test_a_mistake_is_one_short_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    error = capsys.readouterr().err
    assert leaving.value.code == 2 and message in error
    assert error.count("\n") == 1 and len(error) < 250


def test_the_overview_imports_no_command() -> None:
    code = "import sys\nfrom foretell.cli.main import main\ntry:\n    main([])\nexcept SystemExit:\n    pass\n"
    code += "print([name for name in sys.modules if name.split('.')[0] in ('rich', 'torch', 'numpy', 'prompt_toolkit')"
    code += " or name in ('foretell.cli.serve', 'foretell.cli.bench', 'foretell.plan', 'foretell.bench')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_imports_neither_asyncio_nor_libraries_that_start_slowly() -> None:
    code = "import contextlib, os, sys\nfrom foretell.cli.command_table import COMMANDS\n"
    code += "from foretell.cli.main import main\n"
    code += "with contextlib.redirect_stdout(open(os.devnull, 'w')):\n    for name in COMMANDS:\n"
    code += "        with contextlib.suppress(SystemExit):\n            main([*name.split(), '--help'])\n"
    code += "slow = {'asyncio', 'http.client', 'numpy', 'prompt_toolkit', 'rich', 'torch', 'foretell.bench.results'}\n"
    code += "print(len(COMMANDS), sorted(slow & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, found = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert int(count) > 20 and found == "[]"
