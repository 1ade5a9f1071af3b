"""Trains an emitted program of experts whose kernels Triton interprets, on two ranks, against one
process in float64.

    python tests/helpers/kernels/interpreted_program.py ragged

prints as JSON which kernels were started, and a traceback, empty if all is right.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

TOLERANCE = 1e-4
"""The tolerance of float32: gradients are sums of hundreds of terms, relative to the largest of
a parameter.
"""
LR = 0.01


CASES: dict[str, dict[str, Any]] = {
    "ragged": {"model": "losses"},
    "padded": {"model": "capacity", "bounded": True},
}
"""Rows of experts as many as tokens chose them, or as many of each."""


def outcome(case: str) -> tuple[list[str], str]:
    """The kernels that a case started, and a traceback, empty if its steps are right; in a
    process of its own.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, case]
    result = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@contextmanager
def _noted(folder: Path) -> Iterator[None]:
    """Leaves a file for each kernel that is started, by whichever process."""
    from scalec.runtime.kernels import launching

    launch = launching.launch

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        (folder / kernel.__name__).touch()
        launch(kernel, *args, **options)

    with patch.object(launching, "launch", noted):
        yield


def _trained(name: str, folder: Path) -> None:
    from helpers.oracle import harness, reference
    from helpers.oracle.compare import assert_same
    from helpers.oracle.plans import Case

    case = Case(
        dp=2, experts="dp", kernels="triton", precision="fp32", optimizer="adamw", **CASES[name]
    )
    start, batches = reference.initial(case.config), list(harness.batches(case, 2))
    expected = reference.run(case.config, case.training, start, batches, LR)
    with TemporaryDirectory() as program, _noted(folder):
        steps = harness.run(case, harness.load_case(case, Path(program)), start, batches, LR)
    for number, (got, want) in enumerate(zip(steps, expected, strict=True)):
        assert_same(got, want, f"step {number}, ", TOLERANCE)


def _main(case: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    failure = ""
    with TemporaryDirectory() as folder:
        try:
            _trained(case, Path(folder))
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps(([path.name for path in Path(folder).iterdir()], failure)))


if __name__ == "__main__":
    _main(sys.argv[1])
