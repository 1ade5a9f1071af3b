"""The command `plans`: the plans and models that come with scalec."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Command
from .output import show

if TYPE_CHECKING:
    from ..ir import Program

MODELS = "models/"
"""The folder of models alone, which plans use."""

Row = tuple[str, str, str, str]


def plans(options: Namespace) -> None:
    """`scalec plans`."""
    from ..reports.summary import table
    from ..syntax.package_data import SHIPPED, package_files

    heads: list[Row] = [("plan", "parameters", "ranks", "")]
    models: list[Row] = [("model", "parameters", "", "")]
    for name, path in package_files().items():
        is_model = name.removeprefix(SHIPPED).startswith(MODELS)
        rows = models if is_model else heads
        rows.append(_row(name, path, is_model))
    lines = list(table([*heads, ("", "", "", ""), *models], "lrrl"))
    command = "scalec check scalec:llama3_8b"
    use = 'use "scalec:models/llama.scale" { dims { layers = 2 } }'
    lines += [
        "",
        f"a command takes a name for a plan: {command}",
        f"a plan uses a model: {use}",
    ]
    show("\n".join(lines))


def _row(name: str, path: Path, is_model: bool) -> Row:
    from ..analysis.communication import parameter_count
    from ..frontend import resolve
    from ..ir import SEQUENCE
    from ..syntax.limits import load
    from ..syntax.source import Source

    source = load(path)
    if is_model:
        program = resolve(Source("model.scale", f'use "{name}" {run_of(seq=8)}'))
        ranks = ""
        grows = any(SEQUENCE in param.type.dims for param in program.params)
    else:
        program = resolve(source)
        ranks = _ranks(program)
        grows = False
    count = "by its seq" if grows else f"{parameter_count(program):,}"
    return name.removesuffix(".scale"), count, ranks, about(source.text)


def run_of(seq: int) -> str:
    """The section that a model lacks to be a plan."""
    sizes = f"seq = {seq}  global_batch = 1  microbatch = 1  steps = 1"
    return (
        f"train {{ {sizes}  optimizer adamw {{ lr = 1e-3 }}  data text {{ files ="
        f" [python_stdlib] }} }}"
    )


def _ranks(program: "Program") -> str:
    gpu = program.cluster.gpu
    return f"{program.ranks:,} x {gpu}" if gpu else f"{program.ranks:,}"


def about(text: str) -> str:
    """The first sentence of a file's first comment, up to a colon."""
    lines = list(_comment(text))
    return re.split(r"(?<!et al)[:.;](?:\s|$)", " ".join(lines), maxsplit=1)[0]


def _comment(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()


def _arguments(parser: ArgumentParser) -> None:
    """It has none."""


COMMAND = Command(
    plans,
    _arguments,
    "Lists the plans and models that come with scalec: name, parameters, ranks and GPU, and"
    " what each is.\n"
    "Every command takes such a name in the place of a file: `scalec explain memory"
    " scalec:llama3_8b`.\n"
    "`scalec new --from llama3_8b` writes a plan of your own for its model.",
    "scalec plans",
)
