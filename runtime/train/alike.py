"""Agreement of ranks before the first step: an error names a setting that differs, and the ranks
that have each value.

Where all agree, a rank sends the store equally many requests for any number of ranks.
"""

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import torch

from ..comm.store import meet
from ..config.plan import Plan
from ..config.versions import nccl, version_of
from ..errors import RunError
from .options import Options, mesh_words

Settings = Mapping[str, str]
"""Values by the name that a line gives them."""

_COMPANIONS = (
    "schedule.csv",
    "message_groups.csv",
    "tiles.json",
    "hf_names.json",
    "predictions.json",
    "plan.json",
)
_PACKAGES = ("scalec", "triton", "numpy")
_NONE = "none"


def settings(plan: Plan, options: Options) -> Settings:
    """This rank's program, options and versions."""
    program = Path(sys.argv[0])
    files = (program, *map(program.with_name, _COMPANIONS), *_modules_of(program.absolute().parent))
    values = dict[str, str]()
    for file in files:
        if file.is_file():
            values[file.name] = f"sha256 {sha256(file.read_bytes()).hexdigest()[:12]}"
    mesh = mesh_words(plan) or "one rank"
    values["plan"] = f"{plan.name} on {mesh}, batches of {plan.global_batch} x {plan.seq}"
    for option in fields(options):
        if option.compare:
            values[f"--{option.name.replace('_', '-')}"] = _word(getattr(options, option.name))
    for name, value in sorted(os.environ.items()):
        if name.startswith("SCALEC_"):
            values[name] = value
    values["python"] = platform.python_version()
    values["torch"] = torch.__version__
    for name in _PACKAGES:
        values[name] = version_of(name) or _NONE
    if options.device == "cuda":
        values |= {"CUDA": str(torch.version.cuda), "NCCL": nccl()}
    return values


def _modules_of(folder: Path) -> list[Path]:
    """The files in the program's folder that it has imported: the functions of its user ops, and
    the modules that they import.
    """
    origins = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {Path(origin).absolute() for origin in origins if origin}
    return sorted(file for file in files if file.parent == folder)


def alike(
    mine: Settings, help: str = "start all with the same files, options and versions"
) -> None:
    """RunError on all ranks, which names the settings that differ, unless all are the same.

    All ranks call it.
    """
    ranks_by_settings = meet("alike", json.dumps(mine))
    if len(ranks_by_settings) > 1:
        settings_of_ranks = [(ranks, json.loads(text)) for text, ranks in ranks_by_settings.items()]
        raise RunError("the ranks are not alike", *differences(settings_of_ranks), help)


def differences(settings_of_ranks: Sequence[tuple[Sequence[int], Settings]]) -> list[str]:
    """A line for each setting that differs: its values, the value of the fewest ranks first."""
    names: dict[str, None] = {}  # without repeats, in order
    for _, settings in settings_of_ranks:
        names |= dict.fromkeys(settings)
    lines = list[str]()
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for ranks, settings in settings_of_ranks:
            ranks_by_value.setdefault(settings.get(name, _NONE), []).extend(ranks)
        if len(ranks_by_value) > 1:
            fewest_first = sorted(
                ranks_by_value.items(), key=lambda pair: (len(pair[1]), min(pair[1]))
            )
            words = [_has(ranks, value) for value, ranks in fewest_first]
            value, ranks = fewest_first[0]
            words[0] = _has(ranks, f"{name} {value}")
            lines.append(", ".join(words))
    return lines


def _has(ranks: Iterable[int], value: str) -> str:
    """For instance `ranks 0-4, 6 have 2.13.0`."""
    spans = [*_spans(sorted(ranks))]
    if len(spans) == 1 and spans[0].isdecimal():
        return f"rank {spans[0]} has {value}"
    return f"ranks {', '.join(spans)} have {value}"


def _spans(ranks: Sequence[int]) -> Iterator[str]:
    # in a run of consecutive ranks, a rank less its position is constant
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        consecutive = [rank for _, rank in run]
        first, last = consecutive[0], consecutive[-1]
        yield f"{first}" if first == last else f"{first}-{last}"


def _word(value: object) -> str:
    """An option's value in a line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)
