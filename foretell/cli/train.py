"""foretell train: a drafter for a model of one's own."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.config import EngineConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options
from foretell.train.settings import KINDS, TrainConfig

from .certify import EXIT, verdict
from .command import Command

if TYPE_CHECKING:
    from foretell.train.job import TrainJob
    from foretell.train.run import Run
    from foretell.train.trainer import Shown

WIDTH = 24  # of the bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--target", default=EngineConfig.model, metavar="MODEL", help="the model to guess for")
    parser.add_argument("--data", metavar="PATH", help="chats, prompts or texts: a file, a folder, or - for a pipe")
    parser.add_argument("--from-log", metavar="FILE", help="what a server has served (serve --log-requests FILE)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the drafter goes")
    parser.add_argument("--resume", action="store_true", help="go on where a run in DIR was stopped")
    parser.add_argument("--dry-run", action="store_true", help="answer a few prompts, say what it will take, and stop")
    parser.add_argument("--answers-only", action="store_true", help="write the answers (DIR/answers.npz), and stop")
    add_options(parser.add_argument_group("training"), TrainConfig)


def run(args: argparse.Namespace) -> int:
    order = order_of(args)
    from foretell.train.job import Reporter
    from foretell.train.run import Run
    from foretell.train.token_dataset import FILE

    run = Run(order, Reporter(_say, _answered, _shown))
    if args.answers_only:
        _say(f"{len(run.corpus.documents)} texts in {order.out / FILE}")
        return 0
    _say(run.forecast().words)
    if args.dry_run:
        return 0
    if not run.train():
        _say(f"stopped in the midst; go on with --resume --out {order.out}")
        return 0
    return finish(run)


def order_of(args: argparse.Namespace) -> TrainJob:
    """What the flags ask for, checked before anything is loaded."""
    config = TrainConfig(**given_options(args, TrainConfig))
    given = [each for each in (args.data, args.from_log, config.answers) if each is not None]
    if len(given) != 1:
        raise RequestError("data", "give one of --data, --from-log and --answers")
    if args.from_log is not None and not Path(args.from_log).is_file():
        raise RequestError("from_log", f"there is no file {args.from_log}; a server writes one with --log-requests")
    if args.out.exists() and not args.out.is_dir():
        raise RequestError("out", f"{args.out} is a file; name a folder")
    if not args.resume and (args.out / "checkpoint.safetensors").is_file():
        raise RequestError("out", f"{args.out} has a run already; go on with --resume, or name another folder")
    from foretell.train.job import TrainJob

    return TrainJob(args.kind, args.target, args.from_log or args.data, args.out, args.resume, args.dry_run, config)


def finish(run: Run) -> int:
    """Measure the drafter as it is served, certify it, and say where it is."""
    from foretell.train.run import RECORD

    bench, path = run.bench(run.corpus.reporting), run.order.out / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    if not run.config.measure:
        return 0
    worth = bench.worth(run.drafter)
    record["engine"] = {"accepted_per_step": worth.accepted, "drafted": worth.drafted, "prompts": worth.prompts}
    _say(f"{worth.accepted:.2f} tokens a step through the engine, {worth.drafted} guesses, {worth.prompts} prompts")
    code = 0
    if run.config.certify:
        certificate = bench.certified(run.drafter)
        code = EXIT[certificate.verdict]
        record["lossless"] = certificate.lossless
        record["certificate"] = {
            "verdict": certificate.verdict,
            "reasons": certificate.reasons,
            "settings": [asdict(each.evidence) | {"rejected": each.evidence.rejected} for each in certificate.outputs],
        }
        _say(verdict(certificate))
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if code != EXIT["not lossless"]:
        _say(f"serve it with --drafter {run.drafter}")
    return code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _answered(count: int, total: int) -> None:
    if count == total or count % 256 == 0:
        _say(f"{count} of {total} answers written")


def _shown(shown: Shown) -> None:
    full = int(shown.share * WIDTH)
    bar = "#" * full + "." * (WIDTH - full)
    _say(
        f"[{bar}] step {shown.step}  {shown.elapsed:.0f} s  loss {shown.loss:.4f}  "
        f"{shown.accepted:.2f} tokens a step  {shown.tokens_per_second:.0f} tokens/s"
    )


TRAIN = Command("train a drafter for a model", add_arguments, run)
