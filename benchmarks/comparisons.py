"""Measures the comparisons that are always on: windows of data in each step, the state at the
start.

    .venv/bin/python benchmarks/comparisons.py [--steps 60] [--nodes 4]

Trains `plans/tiny_llama.scale` on four forked ranks of this machine, which say that they are on so
many nodes.  CPU seconds of the thread that compares, beside those of the whole process and the wall
clock; of rank 0, without the first five steps.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

import scalec
from scalec.testing.faults import Program, fork

PLAN = Path(__file__).parents[1] / "plans" / "tiny_llama.scale"
RANKS, FIRST = 4, 5


def _timed_main(results: Path, nodes: int) -> None:
    from scalec.runtime.data import window_check
    from scalec.runtime.train import same_state

    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS // nodes)
    os.environ["OMP_NUM_THREADS"] = "1"  # the nodes share the cores of this machine
    usual_fault, usual_require = window_check.WindowCheck.fault, same_state.SameState.require
    steps = list[tuple[float, float, float]]()
    looks = list[float]()

    def fault(self: Any, step: int, windows: Any) -> Any:
        began = time.thread_time()
        found = usual_fault(self, step, windows)
        steps.append((time.thread_time() - began, time.process_time(), time.monotonic()))
        return found

    def require(self: Any, when: str) -> None:
        began = time.process_time()
        usual_require(self, when)
        looks.append(time.process_time() - began)

    window_check.WindowCheck.fault = fault
    same_state.SameState.require = require
    try:
        run_path(sys.argv[0], run_name="__main__")
    finally:
        (results / f"{os.environ['RANK']}.json").write_text(json.dumps([steps, looks]))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=RANKS, choices=(1, 2, 4))
    asked = parser.parse_args()
    steps = asked.steps
    with TemporaryDirectory() as name:
        folder = Path(name)
        scalec.plan(PLAN).write(folder)
        options = f"--device=cpu --steps={steps} --save-every={steps} --eval-every={2 * steps}"
        program = Program(folder, RANKS, options)
        with fork(program, main=lambda: _timed_main(folder, asked.nodes)) as job:
            ended = job.wait()
        assert ended.succeeded, ended.err
        marks, looks = json.loads((folder / "0.json").read_text())
    marks = marks[FIRST : steps - 1]  # the last step is followed by validation
    count = len(marks) - 1
    compared = sum(seconds for seconds, _, _ in marks[1:]) / count
    process, wall = ((marks[-1][of] - marks[0][of]) / count for of in (1, 2))
    print(f"a step takes {wall * 1e3:.1f} ms, and {process * 1e3:.1f} ms of CPU time of a rank")
    print(
        f"windows: {compared * 1e6:.0f} us of CPU time a step, {compared / process:.3%} of the"
        " rank's"
    )
    start, save = looks
    print(
        f"state: {start * 1e3:.1f} ms of CPU time at the start, {save * 1e3:.1f} ms before the"
        " first save"
    )


if __name__ == "__main__":
    main()
