"""foretell ps: the servers that run on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

from .common import Command, add_output_arguments, check_output_path, output_result
from .tables import print_columns

UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))  # seconds each


def run(args: argparse.Namespace) -> int:
    from foretell.server.registry import running_servers

    check_output_path(args)
    servers = running_servers()
    output_result([asdict(server) for server in servers], args)
    if args.json:
        return 0
    if not servers:
        print("no server is running; start one with `foretell serve`")
        return 0
    rows = [
        (each.url, each.model, ", ".join(each.drafters) or "none", str(each.pid), duration(time.time() - each.started))
        for each in servers
    ]
    print_columns(("URL", "model", "drafters", "PID", "up"), rows)
    if sys.stdout.isatty():
        print("stop one with kill PID")
    return 0


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as 2h 5m."""
    left, words = int(max(0.0, seconds)), list[str]()
    for size, unit in UNITS:
        if left >= size or words:
            words.append(f"{left // size}{unit}")
            left %= size
    return " ".join(words[:2]) or "0s"


PS = Command("list the servers that run on this machine; stop one with `kill PID`", add_output_arguments, run)
