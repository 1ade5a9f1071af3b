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

from ..config.interrupts import end_at_once
from ..errors import RunError, reason
from . import calls, machine
from .clock import Clock
from .figures import text
from .links import Links


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the list says; exit status 1 where that cannot be."""
    parser = argparse.ArgumentParser(
        "scalec.runtime.calibrate", description=__doc__, allow_abbrev=False
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
    given = parser.parse_args(arguments)
    try:
        end_at_once()
        _measure(given)
    except (RunError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1
    return 0


def _measure(given: argparse.Namespace) -> None:
    wanted: dict[str, Any] = json.loads(given.list.read_text(encoding="utf-8"))
    device = machine.device(wanted["device"])
    clock = Clock(device)
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"measuring {len(wanted['calls'])} calls and {len(wanted['groups'])} groups of ranks",
            file=sys.stderr,
        )
    clock.warm_up(given.warm_up if given.warm_up is not None else 2 if device.type == "cpu" else 30)
    rows = [*calls.rows(wanted["calls"], clock), *calls.update_rows(wanted["updates"], clock)]
    memory = machine.copied(clock)
    figures = machine.figures(wanted, rows, memory, clock)
    links = Links(wanted, clock, given.most)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        links.measure()
        if links.issued and device.type == "cuda":
            figures["host"]["collective"] = median(links.issued)
        dist.destroy_process_group()
    if int(os.environ.get("RANK", 0)) == 0:
        notes = [
            f"Written by {wanted['written_by']} on {date.today()}: measured with torch"
            f" {torch.__version__}"
        ]
        notes += [*machine.notes(device), *links.notes]
        told = text(notes, figures, links.links(memory), [*rows, *links.rows])
        given.output.write_text(told, encoding="utf-8")
        print(f"wrote {given.output}")


if __name__ == "__main__":
    sys.exit(main())
