"""foretell train and foretell export: train a drafter for a model, and write its head for other engines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.config import EngineConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options
from foretell.train.settings import KINDS, TrainConfig

from .certify import EXIT, verdict
from .common import Command, check_folder_writable, log
from .interrupts import deferred_interrupt

if TYPE_CHECKING:
    from foretell.train.run import TrainingRun
    from foretell.train.settings import TrainingProgress, TrainJob

ANSWERS_PER_LINE = 256  # answers between two progress lines
FORMATS = ("speculators", "eagle3")


ABOUT = {  # by kind of drafter
    "medusa": "Medusa heads: each predicts one of the next tokens from the target's hidden state",
    "eagle": "EAGLE-3 head: drafts token by token from the target's hidden states",
    "block": "block head: drafts several tokens in one pass, as DFlash does",
    "distill": "small draft model made of some of the target's layers",
    "streaming": "the target itself with Medusa heads (Speculative Streaming)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    for kind in KINDS:
        sub = kinds.add_parser(kind, help=ABOUT[kind], description=f"train a drafter: {ABOUT[kind]}")
        add_kind_arguments(sub)
        sub.set_defaults(parser=sub)


def add_kind_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=EngineConfig.model, metavar="MODEL", help="target model of the drafter")
    parser.add_argument("--data", metavar="PATH", help="chats, prompts or plain text: a file, a folder, or - for stdin")
    parser.add_argument("--from-log", metavar="FILE", help="train on logged requests (foretell serve --log-requests)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder of the drafter")
    parser.add_argument("--resume", action="store_true", help="resume the run in DIR from its checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="answer a few prompts, estimate the cost, and exit")
    parser.add_argument("--answers-only", action="store_true", help="generate the answers (DIR/answers.npz) and exit")
    add_options(parser.add_argument_group("training"), TrainConfig)


def run(args: argparse.Namespace) -> int:
    if args.kind is None:
        args.parser.print_help()
        return 0
    job = job_of(args)
    from foretell.train.run import TrainingRun
    from foretell.train.settings import Reporter
    from foretell.train.token_dataset import ANSWERS_FILE

    run = TrainingRun(job, Reporter(log, _log_answers, _log_progress))
    with answers_kept(job.out / ANSWERS_FILE):
        if args.answers_only:
            log(f"{len(run.corpus.documents)} documents in {job.out / ANSWERS_FILE}")
            return 0
        log(run.estimate_cost().summary)
    if args.dry_run:
        return 0
    with deferred_interrupt(log) as stopped:
        done = run.train(stopped)
        interrupted = stopped()
    if interrupted or not done:
        log(f"checkpoint of step {run.trainer.state.step} saved; continue with --resume --out {job.out}")
    if interrupted:
        raise KeyboardInterrupt
    return finish(run) if done else 0


@contextmanager
def answers_kept(file: Path) -> Iterator[None]:
    """Report at Ctrl-C where the answers generated so far are, and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if file.is_file():
            log(f"the answers so far are in {file}; continue with --resume --out {file.parent}")
        raise


def job_of(args: argparse.Namespace) -> TrainJob:
    """Return the job of the flags, checked before anything is loaded."""
    config = TrainConfig(**given_options(args, TrainConfig))
    given = [each for each in (args.data, args.from_log, config.answers) if each is not None]
    if len(given) != 1:
        raise RequestError("data", "give one of --data, --from-log and --answers")
    if args.from_log is not None and not Path(args.from_log).is_file():
        raise RequestError("from_log", f"there is no file {args.from_log}; a server writes one with --log-requests")
    check_folder_writable(args.out)
    if not args.resume and (args.out / "checkpoint.safetensors").is_file():
        raise RequestError("out", f"{args.out} has a run already; continue it with --resume, or name another folder")
    from foretell.train.settings import TrainJob

    return TrainJob(
        kind=args.kind,
        target=args.target,
        data=args.from_log or args.data,
        out=args.out,
        resume=args.resume,
        dry_run=args.dry_run,
        config=config,
    )


def finish(run: TrainingRun) -> int:
    """Evaluate the drafter in the engine, certify it, and add both to run.json."""
    from foretell.train.run import RUN_FILE

    evaluator, path = run.evaluator(run.corpus.report_documents), run.job.out / RUN_FILE
    record = json.loads(path.read_text(encoding="utf-8"))
    if not run.config.measure:
        return 0
    found = evaluator.measure(run.drafter)
    record["engine"] = asdict(found)
    log(
        f"{found.accepted_per_step:.2f} tokens per step in the engine "
        f"({found.drafted} draft tokens, {found.prompts} held-out prompts)"
    )
    code = 0
    if run.config.certify:
        certificate = evaluator.certify(run.drafter)
        code = EXIT[certificate.verdict]
        record["lossless"] = certificate.lossless
        record["certificate"] = {
            "verdict": certificate.verdict,
            "reasons": certificate.reasons,
            "settings": [asdict(each.evidence) | {"rejected": each.evidence.rejected} for each in certificate.outputs],
        }
        log(verdict(certificate))
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if code != EXIT["not lossless"]:
        log(f"serve it with --drafter {run.drafter}")
    return code


def _log_answers(count: int, total: int) -> None:
    if count == total or count % ANSWERS_PER_LINE == 0:
        log(f"{count} of {total} answers generated")


def _log_progress(progress: TrainingProgress) -> None:
    log(
        f"{progress.fraction_done:4.0%}  step {progress.step}  {progress.elapsed:.0f} s  loss {progress.loss:.4f}  "
        f"{progress.accepted:.2f} tokens/step  {progress.tokens_per_second:.0f} tokens/s"
    )


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("draft", metavar="DIR", type=Path, help="folder of a head that `foretell train` wrote")
    parser.add_argument("--format", choices=FORMATS, required=True, help="vLLM reads both, SGLang eagle3")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--target", default=EngineConfig.model, metavar="MODEL", help="target model of the head")
    parser.add_argument("--target-name", metavar="NAME", help="the target's name in the other engine (default: MODEL)")


def run_export(args: argparse.Namespace) -> int:
    if not (args.draft / "config.json").is_file():
        raise RequestError("draft", f"{args.draft} has no config.json; name the folder of a trained head")
    check_folder_writable(args.out)
    from foretell.build.model_source import open_model
    from foretell.models.draft_heads import read_head
    from foretell.train.export import export_head

    config = EngineConfig(model=args.target, device="cpu", quantization="none", dtype="float32")
    source = open_model(args.target, config, log)
    head = read_head(args.draft)
    if (head.config.vocab, head.config.target_width) != (source.config.vocab, source.config.width):
        raise RequestError("target", f"{args.target} is not the model this head was trained for ({head.config.target})")
    export_head(head, source.load(), source, args.target_name or args.target, args.format, args.out)
    log(f"{args.out}: an EAGLE-3 head in the {args.format} format")
    return 0


TRAIN = Command("train a drafter for a model", add_arguments, run)
EXPORT = Command("export a trained EAGLE-3 head for vLLM or SGLang", add_export_arguments, run_export)
