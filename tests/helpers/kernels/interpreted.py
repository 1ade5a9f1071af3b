"""Runs the cases of modules under Triton's interpreter, which must be chosen before any kernel is
defined.

    python tests/helpers/kernels/interpreted.py cases_norms cases_attention.case_all_options

prints what came of each case as JSON: module and name, and a traceback, empty if it passed.  A
module stands for all its cases but the long ones, which are named one by one.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path


def is_long(case: str) -> bool:
    """Whether a case takes many seconds, by its name."""
    return case.startswith("case_all_")


@cache
def outcomes(names: tuple[str, ...]) -> dict[str, str]:
    """The traceback of each case of modules, or of a single one, empty if it passed; in one
    process, since starting takes long.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, *names]
    result = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def _outcome(case: Callable[[str], None]) -> str:
    try:
        case("cpu")
    except Exception:
        return traceback.format_exc()
    return ""


def _main(names: Sequence[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from helpers.kernels.tensor_cores import emulated

    cases = dict[str, Callable[[str], None]]()
    for name in names:
        module_name, _, single = name.partition(".")
        module = importlib.import_module(f"helpers.kernels.{module_name}")
        for key, value in vars(module).items():
            if key == single or (not single and key.startswith("case_") and not is_long(key)):
                cases[f"{module_name}.{key}"] = value
    with emulated():
        print(json.dumps({key: _outcome(case) for key, case in cases.items()}))


if __name__ == "__main__":
    _main(sys.argv[1:])
