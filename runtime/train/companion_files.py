"""Reads the files that lie beside a program: a pipeline's schedule, the names that Hugging Face
has for parameters, and predictions of a step.

Non-goals: tiles of kernels (`kernels.tiles_file`); checks of the files' content, which the compiler
has done.
"""

import json
from hashlib import sha256 as sha_256
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.hf_weights import HFNames, HFWeight
from ..config.plan import Account, Expected, Prediction
from ..errors import RunError
from .shutdown import refuse


def read_schedule(name: str, beside: str, sha256: str) -> tuple[str, ...]:
    """The rows in a CSV file beside a program: for each rank its actions, in the notation of
    torch.distributed.pipelining.

    Exit status 2, with a line that says why, where the file is missing or has another hash.
    """
    return tuple(text_beside(name, beside, sha256).splitlines())


def read_hf_names(name: str, beside: str, sha256: str) -> HFNames:
    """Where files of weights hold the parameters, by a JSON file beside a program.

    Exit status 2 as in `read_schedule`.
    """
    description = json.loads(text_beside(name, beside, sha256))
    stored = {param: HFWeight.read(fields) for param, fields in description["weights"].items()}
    return HFNames(getattr(torch, description["dtype"]), stored, description["repeats"])


def read_predictions(name: str, beside: str, sha256: str) -> tuple[Prediction, ...]:
    """The memory and the time of a step that the compiler predicts for each mesh of a program, by
    a JSON file beside it.

    Exit status 2 as in `read_schedule`.
    """
    content = json.loads(text_beside(name, beside, sha256))
    return tuple(map(_to_prediction, content["predictions"]))


def _to_prediction(entry: dict[str, Any]) -> Prediction:
    memory, time = entry["account"], entry.get("expected")
    ranks, most = tuple(memory["ranks"]), tuple(memory.get("most", ()))
    account = Account(**memory | {"ranks": ranks, "most": most})
    expected = Expected(**time) if time else None
    return Prediction(entry["mesh"], account, expected)


def text_beside(name: str, beside: str, sha256: str) -> str:
    """The text of a file beside a program.  Exit status 2 without it: a run cannot start."""
    path = Path(beside).with_name(name)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        refuse(
            RunError(
                f"{path} is missing: copy it from where the plan was compiled, or compile the"
                " plan again"
            )
        )
    except OSError as error:
        refuse(error)
    if sha_256(content).hexdigest() != sha256:
        compiled = f"the one that {Path(beside).name} was compiled with"
        refuse(RunError(f"{path} is not {compiled}: remove it and compile the plan again"))
    return content.decode()
