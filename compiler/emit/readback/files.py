"""The files that a program reads from beside itself, which it knows by their hashes.

Non-goals: what is in them (`hf_names`, `pipeline`).
"""

import ast
from collections.abc import Mapping

from ..plan_json import digest


def read_beside(function: str, name: str, text: str) -> str:
    """The call that reads a file with this text from beside the program."""
    return f"{function}({name!r}, beside=__file__, sha256={digest(text)!r})"


def check_files(files: Mapping[str, str]) -> None:
    """Compares the files beside `train.py`, name → text with it, with the hashes in it, which `check` has compared.

    Raises AssertionError where the two differ.
    """
    calls = [node for node in ast.walk(ast.parse(files["train.py"])) if isinstance(node, ast.Call)]
    known = {call.args[0]: each.value for call in calls for each in call.keywords if each.arg == "sha256"}
    said = {ast.literal_eval(name): ast.literal_eval(hashed) for name, hashed in known.items()}
    found = {name: digest(text) for name, text in files.items() if name != "train.py"}
    wrong = sorted({*said.items()} ^ {*found.items()})
    assert not wrong, f"emit: {wrong[0][0]} is not the file that the program reads"
