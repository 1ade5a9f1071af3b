"""The command `new`: a first plan for this machine; it looks at the machine and asks nothing."""

import os
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from ...compiler.cli.command import Command, file_path, plan_path
from ...compiler.cli.output import UsageError, cannot_write
from ...compiler.config.gpus import GPUS
from ...compiler.config.values import TEXT
from ...compiler.emit.naming import run_word
from ...compiler.syntax.package_data import SHIPPED, fill_template
from ...compiler.syntax.source import Source
from ..formatter import format_plan
from .scaled import model_of

MOST = 4
"""Processes of a first plan on CPUs."""

CPU_SIZE, GPU_SIZE = 1_000_000, 30_000_000
"""Parameters of a model that comes with scalec, where `--size` does not say them."""

SMALL = {"hidden": 64, "heads": 4, "layers": 2, "seq": 128}
LARGE = {"hidden": 512, "heads": 8, "layers": 8, "seq": 512}
"""Sizes of a first plan on CPUs and on GPUs."""

NEAR = 1.5
"""A model has at most this many times as many parameters as it should, or as few."""

SPLIT = 20
"""The least number of files of which one is small enough to hold out; of a single file, its last
part is held out.
"""


class Machine(NamedTuple):
    """The cores that this process may use, and the GPUs, by their makers' names."""

    cores: int
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0]}"
        plural = "" if self.cores == 1 else "s"
        return f"{self.cores} CPU core{plural} and no GPU"

    @property
    def ranks(self) -> int:
        """A process for each GPU, or for some of the cores: a power of two, so that it divides
        batches and dims.
        """
        return 1 << ((len(self.gpus) or min(self.cores, MOST)).bit_length() - 1)

    @property
    def gpu(self) -> str:
        """The GPU as plans call it; "" where they have no name for it."""
        if not self.gpus:
            return ""
        words = re.split(r"[^a-z0-9]+", self.gpus[0].lower())
        names = [name for name in GPUS if name.split("_")[0] in words]
        for name in names:
            if name.split("_")[-1] in words or name.endswith("_sxm"):
                return name
        return names[0] if names else ""


def new(options: Namespace) -> None:
    """`scalec new`."""
    path, machine = options.plan, this_machine()
    if path.suffix != ".scale":
        raise UsageError(f"a plan's name ends in `.scale`: scalec new {path.with_suffix('.scale')}")
    if options.size and not options.model:
        raise UsageError("--size goes with a model that comes with scalec: --from llama3_8b")
    sizes = LARGE if machine.gpus else SMALL
    model = (
        _model_settings(options.model, options.size, sizes["seq"], machine) if options.model else {}
    )
    text = plan_text(path, machine, options.text, model)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"`{path}` exists: name another, as in `scalec new second.scale`"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
    print(f"wrote {path}, for {machine}\nto train it:\n\n  scalec run {shlex.quote(str(path))}")


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import subprocess

    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer: str = subprocess.run(
            ask, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    return Machine(cores, tuple(name.strip() for name in answer.splitlines() if name.strip()))


def data(files: list[str] | None, mask: str = "") -> str:
    """The section of data; where there are many files, some are held out.  UsageError where there
    are none.

    `mask` has its settings for a model that predicts hidden tokens.
    """
    if not files:
        note = '# text of your own: files = ["notes/*.txt"]'
        return f"data text {{ files = [python_stdlib]  holdout = 5%  {mask} }} {note}"
    all_paths = set[str]()
    for pattern in files:
        paths = [path for path in glob(pattern, recursive=True) if Path(path).is_file()]
        if not any(Path(path).stat().st_size for path in paths):
            raise UsageError(
                f"`{pattern}` is no file that holds anything, looked for in {Path.cwd()}"
            )
        all_paths.update(paths)
    holdout, note = "holdout = 5%", ""
    if 1 < len(all_paths) < SPLIT:
        holdout = ""
        note = " # holdout = 5% would keep whole files for validation, one at least"
    names = ", ".join(map(TEXT.show, files))
    return f"data text {{ files = [{names}]  {holdout}  {mask} }}{note}"


def _model_settings(model: Path, size: int | None, seq: int, machine: Machine) -> dict[str, Any]:
    """The parts of a plan that say its model, at about `size` parameters.

    UsageError where there is no such size.
    """
    target = size or (GPU_SIZE if machine.gpus else CPU_SIZE)
    shipped = model_of(model, seq)
    scaled = shipped.find_sizes(target)
    if scaled is None:
        raise UsageError(
            f"the model of `{model.stem}` cannot be made smaller: write `use` and its dims yourself"
        )
    if not target / NEAR < scaled.parameters < target * NEAR:
        raise UsageError(
            f"no sizes of `{model.stem}` are near that: the nearest have {scaled.parameters:,}"
            " parameters"
        )
    mask = "masked = 15%  mask_token = 0" if shipped.is_bidirectional else ""
    return {
        "used": shipped.used,
        "dims": scaled.dims,
        "parameters": f"{scaled.parameters:,}",
        "mask": mask,
    }


def plan_text(path: Path, machine: Machine, files: list[str] | None, model: dict[str, Any]) -> str:
    """The plan, as `scalec fmt` lays it out; `model` says which one it uses, if not its own."""
    sizes, batch = SMALL, 16
    if machine.gpus:
        sizes, batch = LARGE, 16 * machine.ranks
    words: dict[str, Any] = {"used": "", **sizes, **model}
    plan, run = shlex.quote(str(path)), shlex.quote(f"runs/{run_word(str(path))}")
    soon = "" if model else ", in about a minute"
    commands = {
        f"scalec run {plan}": f"compiles, proves and trains it{soon}; typed once more, it goes on",
        f"scalec run --anew {plan}": "begins once more, after a change of the model",
        f"scalec log {run}": "draws the loss",
        f"scalec report {plan}": "shows the plan as a page",
    }
    text = fill_template(
        "new.scale.j2",
        machine=str(machine),
        commands=commands.items(),
        width=max(map(len, commands)),
        ranks=machine.ranks,
        gpu=machine.gpu,
        gpus=machine.gpus,
        data=data(files, model.get("mask", "")),
        batch=batch,
        **words,
    )
    return format_plan(Source(str(path), text))


def _shipped_plan_path(text: str) -> Path:
    return plan_path(f"{SHIPPED}{text.removeprefix(SHIPPED)}")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", text, re.IGNORECASE)
    if match is None:
        raise ArgumentTypeError(f"`{text}` is not a number of parameters: write 30M, 1.5B or 500K")
    return round(float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[match[2].upper()])


def _arguments(parser: ArgumentParser) -> None:
    help = "the plan to write (default: %(default)s)"
    parser.add_argument(
        "plan", type=file_path, nargs="?", default=Path("first.scale"), metavar="PLAN", help=help
    )
    help = "use a model that comes with scalec, as llama3_8b: `scalec plans` lists them"
    parser.add_argument("--from", dest="model", type=_shipped_plan_path, metavar="NAME", help=help)
    help = (
        "its parameters, as 30M: its widths and layers shrink alike (default: 1M on CPUs, 30M"
        " on GPUs)"
    )
    parser.add_argument("--size", type=_size, metavar="N", help=help)
    help = (
        "files of text to train on, `*` for any part of a name (default: the source of"
        " Python's standard library)"
    )
    parser.add_argument("--text", nargs="+", metavar="FILE", help=help)


COMMAND = Command(
    new,
    _arguments,
    "Writes a small language model as a plan with comments, for the GPUs or cores of this"
    " machine, and asks nothing.\n"
    "It trains in about a minute, on Python's standard library or on text of your own, byte by"
    " byte.\n"
    "With --from the model is one that comes with scalec, at another size.",
    'scalec new mine.scale --text "notes/*.txt"',
)
