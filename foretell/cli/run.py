"""foretell run: chat with a model, or answer one prompt, as `ollama run` does."""

from __future__ import annotations

import argparse
import sys

from foretell.errors import RequestError

from .chat import CHAT
from .common import MODEL_ARGUMENT, Command
from .generate import GENERATE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(MODEL_ARGUMENT, metavar="MODEL", help="built-in name, folder, .gguf file or Hugging Face id")
    GENERATE.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "prompt":
            action.nargs, action.required = "*", False
            action.help = "prompt; without one, chat, or answer what standard input has"
        elif action.option_strings:  # so that flags left out get the defaults of the command that runs
            action.default = argparse.SUPPRESS
            if action.dest == "model":
                action.help = argparse.SUPPRESS


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name not in ("prompt", "run", "parser")}
    prompt = " ".join(args.prompt) or ("" if sys.stdin.isatty() else "-")
    command, words = (GENERATE, [prompt]) if prompt else (CHAT, [])
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    for name in given.keys() - {action.dest for action in parser._actions}:
        raise RequestError(name, "is not for a chat; give a prompt")
    return command.run(argparse.Namespace(**vars(parser.parse_args(words)) | given))


RUN = Command("chat with a model, or answer one prompt", add_arguments, run)
