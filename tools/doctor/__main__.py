"""`python -m scalec.tools.doctor [NEEDS] [--out DIR]`: one process a rank, as a
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

from ...runtime.errors import RunError, reason
from .checks import FAIL, OK, Finding, findings
from .job import Job
from .report import Needs, Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the findings on rank 0.  Exit status, on all ranks: 1 where a finding is a fault, or
    else 0.
    """
    parser = argparse.ArgumentParser("scalec.tools.doctor", description=__doc__, allow_abbrev=False)
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
    options = parser.parse_args(arguments)
    try:
        needs = Needs.read(options.needs) if options.needs else Needs()
        if "RANK" not in os.environ and 1 < needs.ranks_per_node <= _room(needs):
            return _start_ranks(
                needs.ranks_per_node, sys.argv[1:] if arguments is None else arguments
            )
        job = Job(needs, options.out or Path("runs", needs.name))
        reports = job.reports()
        all_findings = findings(needs, reports, job.world) if reports else []
        if not job.rank:
            _print(all_findings, reports, options.json)
        status = job.status(int(any(finding.level == FAIL for finding in all_findings)))
        job.leave()
    except (RunError, OSError) as error:
        return _fail(reason(error))
    except RuntimeError as error:
        return _fail(str(error).splitlines()[0])
    return status


def _fail(line: str) -> int:
    """Prints why this rank fails; its exit status."""
    print(f"error: rank {os.environ.get('RANK', 0)}: {line}", file=sys.stderr)
    return 1


def _room(needs: Needs) -> int:
    """How many ranks this machine can start."""
    if needs.device == "cuda":
        return torch.cuda.device_count()
    return os.cpu_count() or 1


def _start_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Starts a process for each rank of a node, as a launcher does, and returns the largest exit
    status.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common["LOCAL_WORLD_SIZE"] = str(ranks)
    command = [sys.executable, "-m", __package__ or "", *arguments]
    processes = list[subprocess.Popen[bytes]]()
    for rank in range(ranks):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=environment))
    return max(process.wait() for process in processes)


def _print(findings: Sequence[Finding], reports: Sequence[Report], as_json: bool) -> None:
    if as_json:
        content = {
            "findings": [asdict(finding) for finding in findings],
            "ranks": [asdict(report) for report in reports],
        }
        print(json.dumps(content))
        return
    for finding in findings:
        print(finding)
    bad = sum(finding.level != OK for finding in findings)
    summary = "all ok"
    if bad:
        summary = f"{len(findings) - bad} of {len(findings)} are ok"
    print(f"\n{summary}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
