"""Measures this machine, or with torchrun a cluster, and writes the file of its figures on rank
0.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.config.interrupts import end_at_once
from ...runtime.errors import RunError, reason
from . import calls, machine
from .clock import Clock
from .figures import text
from .links import Links


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the calls and groups of the list; exit status 1 where that is not possible."""
    parser = argparse.ArgumentParser(
        "scalec.tools.calibrate", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "list", type=Path, metavar="LIST", help="what to measure, written by `scalec calibrate`"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write"
    )
    parser.add_argument(
        "--warm-up", type=float, metavar="S", help="seconds under load before (30, on a CPU 2)"
    )
    help = "the largest message between ranks, in bytes (1 GiB)"
    parser.add_argument("--most", type=int, default=1 << 30, metavar="BYTES", help=help)
    options = parser.parse_args(arguments)
    try:
        end_at_once()
        _measure(options)
    except (RunError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1
    return 0


def _measure(options: argparse.Namespace) -> None:
    wanted: dict[str, Any] = json.loads(options.list.read_text(encoding="utf-8"))
    device = machine.device(wanted["device"])
    clock = Clock(device)
    is_first = int(os.environ.get("RANK", 0)) == 0
    if is_first:
        print(
            f"measuring {len(wanted['calls'])} calls and {len(wanted['groups'])} groups of ranks",
            file=sys.stderr,
        )
    seconds = options.warm_up
    if seconds is None:
        seconds = 2 if device.type == "cpu" else 30
    clock.warm_up(seconds)
    rows = [*calls.rows(wanted["calls"], clock), *calls.update_rows(wanted["updates"], clock)]
    memory = machine.copy_rate(clock)
    figures = machine.figures(wanted, rows, memory, clock)
    links = Links(wanted, clock, options.most)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        links.measure()
        if links.issue_times and device.type == "cuda":
            figures["host"]["collective"] = median(links.issue_times)
        dist.destroy_process_group()
    if is_first:
        notes = [
            f"Written by {wanted['written_by']} on {date.today()}: measured with torch"
            f" {torch.__version__}"
        ]
        notes += [*machine.notes(device), *links.notes]
        content = text(notes, figures, links.links(memory), [*rows, *links.rows])
        options.output.write_text(content, encoding="utf-8")
        print(f"wrote {options.output}")


if __name__ == "__main__":
    sys.exit(main())
