"""foretell plan fleet: how many copies a demand needs, and how long its callers wait."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from foretell.options import add_options, given_options
from foretell.plan.config import PlanConfig, parts_of
from foretell.plan.fleet.config import FleetConfig, trial_of
from foretell.plan.fleet.table import words

from .command import Command
from .common import add_output_arguments, give


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("demand and fleet"), FleetConfig)
    add_options(parser.add_argument_group("models and devices, of one copy"), PlanConfig)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = PlanConfig(**given_options(args, PlanConfig))
    fleet = FleetConfig(**given_options(args, FleetConfig))
    trial = trial_of(config, fleet, parts_of(config))
    found = trial.fewest() if fleet.replicas is None else trial.of(fleet.replicas)
    print(words(trial, found, fleet.replicas is not None), file=sys.stderr if args.json else sys.stdout)
    give({"plan": "fleet", "models": asdict(config), "fleet": asdict(fleet), **found.as_json()}, args)
    return 0


FLEET = Command("how many copies a demand needs, in simulation", add_arguments, run)
