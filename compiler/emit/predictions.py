"""The file beside an emitted program that says what the compiler predicts of a step: its memory,
and its time where the speed of the plan's GPUs is known.

Non-goals: how both are computed (`analysis.memory`, `analysis.time`); what a run does with them
(the runtime).
"""

import json
from typing import Any

from .. import __version__
from ..analysis.elastic import every_size
from ..analysis.memory import account, accounts, at_loads
from ..analysis.time import get_expected_report
from ..ir import Program

PREDICTIONS = "predictions.json"


def predictions_file(program: Program) -> dict[str, str]:
    """The file that a program reads, name → text; an elastic axis has an entry for each size."""
    content = {
        "written_by": f"scalec {__version__}",
        "predictions": [_prediction(sized) for sized in every_size(program)],
    }
    return {PREDICTIONS: f"{json.dumps(content, indent=1)}\n"}


def _prediction(program: Program) -> dict[str, Any]:
    """The prediction for one mesh; its fields are the arguments of the runtime's classes."""
    prediction: dict[str, Any] = {
        "mesh": {axis.name: axis.size for axis in program.axes},
        "account": _memory(program),
    }
    if time := _time(program):
        prediction["expected"] = time
    return prediction


def _memory(program: Program) -> dict[str, Any]:
    """The peak of tensors in bytes, of each rank along a pipeline's axis, and CUDA's reserve.

    Where loads of experts differ, `ranks` is for equal loads and `most` for the worst.
    """
    first = account(program)
    loads = [accounts_at_load for _, accounts_at_load in at_loads(program)]
    equal = loads[0] if loads else accounts(program)
    memory: dict[str, Any] = {
        "device": first.device,
        "ranks": [rank_account.total for rank_account in equal],
    }
    if first.reserve:
        memory["reserve"] = first.reserve
    if program.pipeline:
        memory["axis"] = program.pipeline.axis
    if loads:
        memory["most"] = [rank_account.total for rank_account in loads[-1]]
    return memory


def _time(program: Program) -> dict[str, Any]:
    """The seconds of a step, to four digits, and the figures that MFU is computed from."""
    report = get_expected_report(program)
    if report is None:
        return {}
    return {
        "gpu": report.on.name,
        "seconds": float(f"{report.step.seconds:.4g}"),
        "error": report.on.error,
        "flops_per_token": report.per_token,
        "peak_flops": report.peak,
    }
