"""Agreement of ranks before the first step: a setting that differs is named, with the ranks that
have each value.

Where all agree, a rank asks the store as much whatever the number of ranks.
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
"""Values by the words that name them in a line."""

_COMPANIONS = ("schedule.csv", "message_groups.csv", "tiles.json", "hf_names.json", "plan.json")
_PACKAGES = ("scalec", "triton", "numpy")
_NONE = "none"


def settings(plan: Plan, options: Options) -> Settings:
    """This rank's program, options and versions."""
    program = Path(sys.argv[0])
    files = (program, *map(program.with_name, _COMPANIONS), *_modules_of(program.absolute().parent))
    return {
        **{
            it.name: f"sha256 {sha256(it.read_bytes()).hexdigest()[:12]}"
            for it in files
            if it.is_file()
        },
        "plan": f"{plan.name} on {mesh_words(plan) or 'one rank'}, batches of {plan.global_batch}"
        f" x {plan.seq}",
        **{
            f"--{each.name.replace('_', '-')}": _word(getattr(options, each.name))
            for each in fields(options)
            if each.compare
        },
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("SCALEC_")},
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version_of(name) or _NONE for name in _PACKAGES},
        **({"CUDA": str(torch.version.cuda), "NCCL": nccl()} if options.device == "cuda" else {}),
    }


def _modules_of(folder: Path) -> list[Path]:
    """The files in the program's folder that it has imported: functions of its user ops, and
    what these import.
    """
    origins = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {Path(origin).absolute() for origin in origins if origin}
    return sorted(file for file in files if file.parent == folder)


def alike(
    mine: Settings, help: str = "start all with the same files, options and versions"
) -> None:
    """RunError on all ranks, which names what differs, unless all have the same settings.

    All ranks call it.
    """
    found = meet("alike", json.dumps(mine))
    if len(found) > 1:
        told = differences([(ranks, json.loads(word)) for word, ranks in found.items()])
        raise RunError("the ranks are not alike", *told, help)


def differences(found: Sequence[tuple[Sequence[int], Settings]]) -> list[str]:
    """A line for each setting that differs: its values, those of the fewest ranks first."""
    lines = list[str]()
    for name in dict.fromkeys(name for _, settings in found for name in settings):
        values: dict[str, list[int]] = {}
        for ranks, settings in found:
            values.setdefault(settings.get(name, _NONE), []).extend(ranks)
        if len(values) > 1:
            (least, its), *others = sorted(
                values.items(), key=lambda each: (len(each[1]), min(each[1]))
            )
            lines.append(
                ", ".join(
                    (_has(its, f"{name} {least}"), *(_has(ranks, value) for value, ranks in others))
                )
            )
    return lines


def _has(ranks: Iterable[int], value: str) -> str:
    """For instance `ranks 0-4, 6 have 2.13.0`."""
    spans = [*_spans(sorted(ranks))]
    alone = len(spans) == 1 and spans[0].isdecimal()
    return f"rank {spans[0]} has {value}" if alone else f"ranks {', '.join(spans)} have {value}"


def _spans(ranks: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(ranks), key=lambda each: each[1] - each[0]):
        own = [rank for _, rank in run]
        yield f"{own[0]}" if len(own) == 1 else f"{own[0]}-{own[-1]}"


def _word(value: object) -> str:
    """An option's value in a line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
