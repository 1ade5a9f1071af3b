"""Other places for the numbers of log.jsonl, which stays the record of a run: one row each.

If a place fails, the log says so once; the run goes on without it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import RunError

Write = Callable[[int, Mapping[str, float]], object]
"""Writes the numbers of a step."""


def _tensorboard(folder: Path, first: int) -> Write:
    """`folder`/tensorboard; steps after `first` that an earlier run has written are no longer
    shown.
    """
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)  # pyright: ignore[reportUnknownMemberType]
        writer.flush()

    return write


def _wandb(folder: Path, _first: int) -> Write:
    """A run with the folder's name, in the project that WANDB_PROJECT names, else `scalec`."""
    import wandb  # pyright: ignore[reportMissingImports]

    run = wandb.init(  # pyright: ignore
        project=None if "WANDB_PROJECT" in os.environ else "scalec",
        name=folder.name,
        dir=folder,
        resume="allow",
    )
    return lambda step, numbers: run.log(dict(numbers), step=step)  # pyright: ignore


SINKS: Mapping[str, Callable[[Path, int], Write]] = {"tensorboard": _tensorboard, "wandb": _wandb}
"""Each place by the name of the module that it needs; scalec's extra has the same name."""


def check_sinks(names: Sequence[str]) -> None:
    """RunError where one is not installed; on all ranks alike."""
    for name in names:
        if find_spec(name) is None:
            raise RunError(
                f"--log-to {name} needs the package {name}: pip install 'scalec[{name}]'"
            )


class Sinks:
    """The places that a run has asked for."""

    def __init__(self, names: Sequence[str], folder: Path, first: int) -> None:
        self._folder, self._first = folder, first
        self._names, self._open = list(names), dict[str, Write]()

    def write(self, record: Mapping[str, object]) -> str:
        """Writes the numbers of a step's record; why a place gets no more numbers, or ""."""
        step = record["step"]
        assert isinstance(step, int), "sinks: a record without a step"
        numbers = dict[str, float]()
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                numbers[key] = value
        for name in [*self._names]:
            try:
                if name not in self._open:
                    self._open[name] = SINKS[name](self._folder, self._first)
                self._open[name](step, numbers)
            except Exception as error:  # the code of others may raise anything
                self._names.remove(name)
                return (
                    f"warning: --log-to {name} gets no more numbers: {type(error).__name__}:"
                    f" {error}"
                )
        return ""
