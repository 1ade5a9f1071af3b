"""`scalec doctor`: looks at this machine, or under a launcher at all nodes of a job, before a plan is trained there."""

import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

from .streams import UsageError

PROGRAM = "scalec.runtime.calibrate.doctor"
"""The module that looks: the compiler itself does not import torch."""


def doctor(options: Namespace) -> int:
    """`scalec doctor`; returns the exit status, 1 where something would keep the plan from training."""
    if find_spec("torch") is None:
        raise UsageError(f"torch is not installed for {sys.executable}; training needs it")
    words = ["--json"] * options.json
    words += ["--out", str(options.out)] if options.out else []
    sys.stdout.flush()
    with TemporaryDirectory() as folder:
        if options.plan:
            from ..emit.naming import run_word
            from ..reports.job import needs
            from .compile import load

            plan, path = load(options.plan), Path(folder, "needs.json")
            path.write_text(dumps(needs(plan.program, run_word(plan.source.path))), encoding="utf-8")
            words.insert(0, str(path))
        return subprocess.run([sys.executable, "-m", PROGRAM, *words]).returncode
