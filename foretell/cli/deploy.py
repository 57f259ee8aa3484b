"""foretell deploy: replicas of a model on Ray, described by a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from foretell.cluster.config import ClusterConfig
from foretell.errors import RequestError
from foretell.options import given_options

from .command import Command
from .serve import read_file, settings, with_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="FILE", type=Path, help="YAML with the settings of `foretell serve`, those of replicas too"
    )
    parser.add_argument("--remove", action="store_true", help="take the application down instead")


def run(args: argparse.Namespace) -> int:
    if not vars(read_file(args.config)):
        raise RequestError("config", f"{args.config} is empty; say at least what to serve: 'model: smollm2-135m'")
    args = with_file(args)
    server, engine, speculation, _ = settings(args)
    given = given_options(args, ClusterConfig)
    cluster = ClusterConfig(**({"replicas": 1} if "autoscaling" not in given else {}) | given)
    from foretell.cluster.replica_spec import ReplicaSpec
    from foretell.cluster.run import deploy_app, remove_app

    return remove_app(cluster) if args.remove else deploy_app(cluster, ReplicaSpec(server, engine, speculation))


DEPLOY = Command("put replicas of a model on Ray, or another version in their place", add_arguments, run)
