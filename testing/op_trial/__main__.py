"""The process that tries functions: reads signatures from standard input, answers on what was
standard output.

A line of JSON is written when torch has been imported, when a function's trial begins, and when it
has ended, so that who started the process knows which function hangs or ends it.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import torch

from .checks import check_function
from .function import CannotTry, Refused, load_function
from .signature import Signature, read_signature


def main() -> None:
    """Tries each function."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    printed = TemporaryFile()  # noqa: SIM115  lives as long as the process
    os.dup2(printed.fileno(), 1)
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    _say(answers, {"ready": torch.__version__})
    request: dict[str, Any] = json.load(sys.stdin)
    folder = Path(request["folder"])
    sys.path.insert(0, str(folder))
    for number, fields in enumerate(request["signatures"]):
        _say(answers, {"began": number})
        outcome = _get_outcome(folder, read_signature(fields))
        _say(answers, {"ended": number, **outcome})
    answers.flush()
    os._exit(0)  # threads and handlers that a module has left are of no interest


def _get_outcome(folder: Path, signature: Signature) -> dict[str, str]:
    """The result of a function's trial: empty if the function is as its signature says."""
    try:
        check_function(load_function(folder, signature), signature)
    except Refused as refused:
        return {
            "kind": refused.kind,
            "seen": refused.seen,
            "help": refused.help,
            "dim": refused.dim,
        }
    except CannotTry as reason:
        return {"cannot": str(reason)}
    return {}


def _say(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
