"""foretell export: a head of ours for another engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foretell.config import EngineConfig
from foretell.errors import RequestError

from .command import Command

FORMATS = ("speculators", "eagle3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("draft", metavar="DIR", type=Path, help="the head's folder, as `foretell train` writes it")
    parser.add_argument("--format", choices=FORMATS, required=True, help="whose format: vLLM reads both, SGLang eagle3")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where it goes")
    parser.add_argument("--target", default=EngineConfig.model, metavar="MODEL", help="the model it guesses for")
    parser.add_argument("--target-name", metavar="NAME", help="what others know that model by (default: as given)")


def run(args: argparse.Namespace) -> int:
    if not (args.draft / "config.json").is_file():
        raise RequestError("draft", f"{args.draft} has no config.json; name the folder of a trained head")
    if args.out.exists() and not args.out.is_dir():
        raise RequestError("out", f"{args.out} is a file; name a folder")
    from foretell.build.model_source import open_model
    from foretell.models.draft_heads import read_head
    from foretell.train.export import export_head

    config = EngineConfig(model=args.target, device="cpu", quantization="none", dtype="float32")
    opened = open_model(args.target, config, lambda line: print(line, file=sys.stderr))
    head = read_head(args.draft)
    if (head.config.vocab, head.config.target_width) != (opened.config.vocab, opened.config.width):
        raise RequestError("target", f"{args.target} is not the model this head was trained for ({head.config.target})")
    export_head(head, opened.load(), opened, args.target_name or args.target, args.format, args.out)
    print(f"{args.out}: an EAGLE-3 head in {args.format}'s format", file=sys.stderr)
    return 0


EXPORT = Command("write a trained head as vLLM and SGLang read it", add_arguments, run)
