"""foretell bench compare: the same prompts on transformers and on any OpenAI-compatible server."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.settings import QUICK_COMPARE, CompareSettings
from foretell.bench.workloads import OWN, load, select
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options, nearest

from .bench_common import add_result_arguments, add_workload_arguments, bench_command, open_target, print_report

if TYPE_CHECKING:
    from foretell.bench.compare import CompareResult
    from foretell.bench.peers import Peer
    from foretell.bench.prompt import BenchPrompt

FAILED = 1  # exit code if a request failed
OURS, PLAIN = OWN_SERVER = ("foretell", "foretell:plain")
IN_PROCESS = ("transformers", "transformers:lookup")
DEFAULT = (PLAIN, OURS, "transformers")
PER_TASK = 2
QUICK_TASKS = ("chat", "code", "edit", "extraction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "peers",
        nargs="*",
        default=DEFAULT,
        metavar="PEER",
        help="[NAME=]URL of a server; foretell and foretell:plain start one; transformers and "
        f"transformers:lookup run in this process (default: {' '.join(DEFAULT)}). Request fields can be "
        "appended to the URL: ours=http://127.0.0.1:8000?speculative=false",
    )
    parser.add_argument("--baseline", metavar="NAME", help="baseline of the comparison (default: the first)")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the servers")
    group = parser.add_argument_group("workload")
    add_workload_arguments(group)
    group.add_argument("--per-task", type=int, metavar="N", help=f"prompts per task (default: {PER_TASK})")
    usual = CompareSettings()
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"maximum output tokens (default: {usual.max_tokens})"
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature (default: that of each request, else 0)"
    )
    group.add_argument("--rounds", type=int, metavar="N", help=f"repetitions of each prompt (default: {usual.rounds})")
    group.add_argument("--quick", action="store_true", help="four short prompts: under a minute on an idle machine")
    add_result_arguments(parser)
    add_options(parser.add_argument_group("model of peers started here"), EngineConfig)
    add_options(
        parser.add_argument_group("speculation of a server started here"),
        SpeculationConfig,
        skip=frozenset({"workload"}),
    )


def run(args: argparse.Namespace) -> int:
    from foretell.bench.compare import run_compare
    from foretell.cli.bench_common import ProgressBar

    settings, items = settings_of(args), items_of(args)
    baseline = args.baseline or name_of(args.peers[0])
    with ExitStack() as stack:
        peers = peers_of(args, stack)
        names = [peer.name for peer in peers]
        if baseline not in names:
            raise RequestError("baseline", f"{baseline!r} is not one of the peers; {nearest(baseline, names)}")
        found = run_compare(peers, items, settings, baseline, ProgressBar(), conditions(args, settings, peers))
    report(args, found)
    if found.stopped is not None:
        raise found.stopped
    return FAILED if found.errors else 0


def settings_of(args: argparse.Namespace) -> CompareSettings:
    """Return the settings with the values of given flags."""
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature, "rounds": args.rounds}
    usual = QUICK_COMPARE if args.quick else CompareSettings()
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


def items_of(args: argparse.Namespace) -> list[BenchPrompt]:
    """Return the prompts; of a multi-turn conversation the first turn, since answers differ."""
    tasks = args.tasks or (QUICK_TASKS if args.quick and args.asked == OWN else ())
    per_task = (1 if args.quick else PER_TASK) if args.per_task is None else args.per_task
    if per_task < 1:
        raise RequestError("per_task", f"must be 1 or more, not {per_task}")
    items, _ = select(load(args.asked, args.data, tasks), per_task, lambda item: True)
    return items


def name_of(peer: str) -> str:
    from foretell.bench.peers import Endpoint

    return peer if peer in (*OWN_SERVER, *IN_PROCESS) else Endpoint.parse(peer).name


def peers_of(args: argparse.Namespace, stack: ExitStack) -> list[Peer]:
    """Return all peers in order; running servers are contacted before ours is started."""
    from foretell.bench.peers import Endpoint, check_names

    options = given_options(args, EngineConfig) | given_options(args, SpeculationConfig)
    EngineConfig(**given_options(args, EngineConfig))
    SpeculationConfig(**given_options(args, SpeculationConfig))
    found: dict[str, Peer] = {}
    for word in args.peers:
        if word not in (*OWN_SERVER, *IN_PROCESS):
            endpoint = Endpoint.parse(word, args.api_key)
            endpoint.connect()
            found[word] = endpoint
    found |= in_process(args)
    found |= own_servers(args, options, stack)
    peers = [found[word] for word in args.peers]
    check_names(peers)
    return peers


def in_process(args: argparse.Namespace) -> dict[str, Peer]:
    named = [word for word in IN_PROCESS if word in args.peers]
    if not named:
        return {}
    from foretell.bench.peers import TransformersPeer

    return {peer.name: peer for peer in TransformersPeer(open_target(args), named).peers}


def own_servers(args: argparse.Namespace, options: dict[str, Any], stack: ExitStack) -> dict[str, Peer]:
    """Start one server, for requests with and without speculation."""
    from foretell.bench.peers import Endpoint
    from foretell.bench.server_process import start_server

    if not any(word in args.peers for word in OWN_SERVER):
        return {}
    url = stack.enter_context(start_server(options)).url
    found: dict[str, Peer] = {}
    for name, extra in ((OURS, {}), (PLAIN, {"speculative": False})):
        endpoint = Endpoint(name, Endpoint.parse(url).address, extra)
        endpoint.connect()
        found[name] = endpoint
    return found


def report(args: argparse.Namespace, found: CompareResult) -> None:
    from foretell.bench.compare import remarks, report_table
    from foretell.bench.page.compare import page

    print_report(args, report_table(found), remarks(found), found.as_json(), lambda: page(found))


def conditions(args: argparse.Namespace, settings: CompareSettings, peers: list[Peer]) -> dict[str, Any]:
    """Return the conditions to repeat the measurement."""
    from foretell.bench.machine import describe_host

    return {
        "version": __version__,
        "date": str(date.today()),
        "peers": {peer.name: peer.describe() for peer in peers},
        "workload": args.asked,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "rounds": settings.rounds,
        "machine": describe_host(),
    }


COMPARE = bench_command("bench compare", add_arguments, run)
