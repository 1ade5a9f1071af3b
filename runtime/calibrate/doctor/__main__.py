"""`python -m scalec.runtime.calibrate.doctor [NEEDS] [--out DIR]`: one process a rank, as a
launcher starts them.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ...errors import RunError, reason
from .checks import FAIL, OK, Finding, findings
from .job import Job
from .report import Needs, Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the findings on rank 0; exit status 0, or on all ranks 1 where one of them is a
    fault.
    """
    parser = argparse.ArgumentParser(
        "scalec.runtime.calibrate.doctor", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "needs", type=Path, nargs="?", metavar="NEEDS", help="what a job needs, written by scalec"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run's folder (default: runs/ and the plan's name)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the report of each rank"
    )
    given = parser.parse_args(arguments)
    try:
        needs = Needs.read(given.needs) if given.needs else Needs()
        if "RANK" not in os.environ and 1 < needs.ranks_per_node <= _room(needs):
            return _each(needs.ranks_per_node, sys.argv[1:] if arguments is None else arguments)
        job = Job(needs, given.out or Path("runs", needs.name))
        reports = job.reports()
        found = findings(needs, reports, job.world) if reports else []
        if not job.rank:
            _print(found, reports, given.json)
        status = job.status(int(any(each.level == FAIL for each in found)))
        job.leave()
    except (RunError, OSError, RuntimeError) as error:
        said = (
            reason(error) if isinstance(error, RunError | OSError) else str(error).splitlines()[0]
        )
        print(f"error: rank {os.environ.get('RANK', 0)}: {said}", file=sys.stderr)
        return 1
    return status


def _room(needs: Needs) -> int:
    """How many ranks this machine can start."""
    return torch.cuda.device_count() if needs.device == "cuda" else os.cpu_count() or 1


def _each(ranks: int, arguments: Sequence[str]) -> int:
    """Starts a process for each rank of a node, as a launcher does, and gives the largest exit
    status.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common["LOCAL_WORLD_SIZE"] = str(ranks)
    command = [sys.executable, "-m", __package__ or "", *arguments]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    return max(process.wait() for process in started)


def _print(found: Sequence[Finding], reports: Sequence[Report], as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                {
                    "findings": [asdict(each) for each in found],
                    "ranks": [asdict(each) for each in reports],
                }
            )
        )
        return
    for each in found:
        print(each)
    bad = sum(each.level != OK for each in found)
    print(f"\n{len(found) - bad} of {len(found)} are ok" if bad else "\nall ok", flush=True)


if __name__ == "__main__":
    sys.exit(main())
