"""Check of the docs: commands and flags exist, links resolve, Python compiles. `python -m tests.docs_check`."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from foretell.cli.main import build_parser, parse
from foretell.errors import ForetellError

ROOT = Path(__file__).parents[1]
FOLDERS = ("foretell", "tests", "bench", "recipes", "examples", "requirements")
# Options of other programs that the pages name.
OTHER_PROGRAMS = {"--extra-index-url", "--index-url", "--no-deps", "--pip-args", "--strict"}
OTHER_PROGRAMS |= {"--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
CONTINUED = re.compile(r" *\\\n *")  # a command over several lines
SPAN = re.compile(r"`([^`\n]+)`")  # code within a sentence
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S* ")  # of an environment variable, before a command
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`((?:\w+/)*\w+\.(?:py|cpp|h))`")


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])


def snippets(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    return [code for kind, code in FENCE.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[str]:
    """Return the shell commands of a page without comments."""
    lines = [line for code in snippets(page, "bash") for line in CONTINUED.sub(" ", code).splitlines()]
    commands = [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    return [ASSIGNMENT.sub("", line) if ASSIGNMENT.match(line) else line for line in commands]


def faults() -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in pages():
        name = page.relative_to(ROOT)
        yield from (f"{name}: {fault}" for command in commands(page) for fault in command_faults(command, targets))
        for link in LINK.findall(page.read_text()):
            if "://" not in link and not leads_somewhere(page, link):
                yield f"{name}: the link {link} leads nowhere"
        if page.name != "CHANGELOG.md" and page.parent.name != "log":  # these speak of the past
            yield from (
                f"{name}: there is no {file}" for file in SOURCE.findall(page.read_text()) if not is_source(file)
            )
            yield from (f"{name}: there is no option {flag}" for flag in unknown_flags(page))
        for code in snippets(page, "python"):
            compile(code, str(name), "exec")


def unknown_flags(page: Path) -> list[str]:
    """Return the options that a page names within sentences and neither a command nor a script has."""
    prose = FENCE.sub("", page.read_text())
    named = {flag for span in SPAN.findall(prose) for flag in FLAG.findall(span)}
    return sorted(named - known_flags())


@cache
def known_flags() -> frozenset[str]:
    """Return the options of all commands, and everything that looks like one in the scripts and the package."""
    known: set[str] = set()
    parsers: list[argparse.ArgumentParser] = [build_parser()[0]]
    while parsers:
        for action in parsers.pop()._actions:
            known |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    scripts = [*ROOT.glob("bench/*.py"), *ROOT.glob("docs/*.py"), *ROOT.glob("foretell/server/*_flags.py")]
    return frozenset(known | {flag for script in scripts for flag in FLAG.findall(script.read_text())} | OTHER_PROGRAMS)


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether the file of a link exists, and its heading where the link has an anchor."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def is_source(file: str) -> bool:
    """Return whether a source file is in the repository, by its path or the end of its path."""
    found = (each for folder in FOLDERS for each in (ROOT / folder).glob(f"**/{file.removeprefix(folder + '/')}"))
    return next(found, None) is not None


def command_faults(command: str, targets: set[str]) -> Iterator[str]:
    words = shlex.split(command.split("|")[-1])
    if words[0] == "make" and not set(words[1:]) <= targets:
        yield f"{command!r}: no such make target"
    if words[:3] == ["python", "-m", "foretell"]:
        words = words[2:]
    if words[0] == "foretell":
        try:
            parse(words[1:])
        except (SystemExit, ForetellError) as error:
            if not isinstance(error, SystemExit) or error.code:  # --help and --version exit with 0
                yield f"{command!r} is refused"
    if words[0] == "python" and words[1].endswith(".py") and not (ROOT / words[1]).exists():
        yield f"{command!r}: no such script"


def main() -> int:
    found = list(faults())
    print("\n".join(found) or f"docs: {len(pages())} pages are true to the code")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
