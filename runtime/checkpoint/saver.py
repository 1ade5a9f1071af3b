"""Saves the state of a step atomically, into a folder of its own.

    step-000300/index.json              what is where; size and hash of every file
    step-000300/rank-00002.safetensors  the boxes that rank 2 wrote

A state is saved as boxes of global tensors, each written by one of the ranks that hold it, and each
rank reads those that overlap its own: so any mesh can load what any other saved.  No pickle, which
could run code when it is loaded.

Until all its files are on the disk a checkpoint is called step-NNNNNN.tmp.  A crash leaves at most
such a folder, which the next save removes, and all whole ones as they were.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..comm import c10d
from ..comm.store import meet
from ..errors import RunError, named, reason
from ..state.engine import TrainState
from ..state.shards import Box
from ..state.skips import Held, Losses, LossScale
from . import index, tensor_file
from .agreement import anywhere, together
from .files import Disk, put, settle
from .index import Identity
from .reader import INDEX, Saved, folder_name, opened

_NAMED = 4  # checkpoints in a line
ADAPTED = (*LossScale.KEYS, *Losses.KEYS, *Held.KEYS)
"""State that a run can find anew, as when a plan of another precision, or that watches other
things, continues.
"""


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints outlive the next ones: the `newest`, and of every so many steps;
    `every` 0 is none of these.
    """

    newest: int = 2
    every: int = 0

    def gone(self, paths: Sequence[Path]) -> list[Path]:
        """The paths to remove of all, oldest first."""
        return [
            path
            for path in paths[: -self.newest]
            if not self.every or finished_steps(path) % self.every
        ]


def save(
    folder: Path,
    step: int,
    state: TrainState,
    disk: Disk | None = None,
    run: Identity | None = None,
) -> Path:
    """Writes `folder`/step-NNNNNN, then removes all but the newest two.  Collective; `step` counts
    finished steps.

    `run` is what a run that goes on must have too.

    RunError, on all ranks, where the disk of one refuses, or this step was saved before.
    """
    disk = disk or Disk()
    made = write(folder, step, own_boxes(state), run or {}, disk)
    together(lambda: prune(folder, Keep(), disk))
    return made


def own_boxes(state: TrainState) -> dict[str, Box]:
    """The boxes that this rank writes, by their names in its file."""
    return {box.name: box for box in state.boxes() if box.own and box.tensor.numel()}


def write(
    folder: Path,
    step: int,
    own: Mapping[str, Box],
    run: Identity,
    disk: Disk,
    agree: Callable[[Callable[[], None]], None] = together,
    allowed: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `folder`/step-NNNNNN of all ranks' own boxes; `agree` is their `together`.
    Collective.

    RunError on all ranks, with the number of the first of several that failed; also where rank 0 is
    not `allowed`.
    """
    rank, world = c10d.place()
    saving = _Saving(folder / folder_name(step), step, own, rank, world, disk, run, allowed)
    for stage in (saving.prepare, saving.write, saving.publish):
        agree(partial(saving.told, stage))
    return saving.made


def prune(folder: Path, keep: Keep, disk: Disk) -> None:
    """Has rank 0 remove old checkpoints.  RunError or OSError."""
    if c10d.place()[0] > 0:
        return
    for old in keep.gone(checkpoints(folder)):
        gone = old.with_suffix(".tmp")  # first, so that none is ever there in part
        disk.rename(old, gone)
        disk.remove(gone)


def load(
    path: Path | Saved, state: TrainState, padded_rows: Mapping[str, int] | None = None
) -> None:
    """Fills the state from a checkpoint written on any mesh, and closes it.  Collective.

    `padded_rows` are the rows of padded parameters without padding, of which the checkpoint may
    have more or less.  A loss scale or a window of losses that it lacks begins anew, and one that
    the state has no use for is ignored.  RunError, on all ranks and before anything is changed,
    where one cannot read what it needs.
    """
    saved, boxes = together(lambda: _opened(path, [*state.boxes()], padded_rows or {}))
    keys, held = [key for key in saved.tensors() if key not in ADAPTED], {box.key for box in boxes}
    used = anywhere([key in held for key in keys])
    if extra := [key for key, is_used in zip(keys, used, strict=True) if not is_used]:
        raise RunError(f"{path} has {named(extra)}, which the plan has not")
    for target, source in together(lambda: saved.copies(boxes)):
        target.copy_(source)
    saved.close()
    state.refresh()


def newest(folder: Path) -> Path | None:
    """The last checkpoint in a folder."""
    return next(reversed(checkpoints(folder)), None)


def finished_steps(path: Path) -> int:
    """The number of steps that a checkpoint has finished."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)),
        key=finished_steps,
    )


def newest_whole(folder: Path) -> tuple[Saved | None, list[str]]:
    """The last checkpoint in a folder that is whole, and a line for each newer one that is not.
    Collective.

    Each rank reads a part of the files, so that each is read and hashed once.  RunError, on all
    ranks, where they see other checkpoints, or there are some but none is whole.
    """
    paths = together(lambda: checkpoints(folder))
    seen = meet("checkpoints", " ".join(path.name for path in paths))
    if len(seen) > 1:
        words = [
            f"rank {ranks[0]} sees {' '.join(word.split()[-_NAMED:]) or 'none'}"
            for word, ranks in seen.items()
        ]
        raise RunError(
            f"ranks see other checkpoints in {folder}: is it one folder for all nodes?", *words[:2]
        )
    notes = list[str]()
    for path in reversed(paths):
        saved, own = _checked(path)
        fault = "; ".join(word for word in meet("whole", own) if word)
        if saved and not fault:
            saved.checked()
            return saved, notes
        notes.append(f"{path} is damaged: {fault}")
    if notes:
        raise RunError(f"no checkpoint in {folder} is whole", *notes)
    return None, []


def set_aside(folder: Path, step: int) -> list[str]:
    """Gives checkpoints of later steps, which a run does not go on from, names that no run
    reads; a line for each.
    """
    later = [path for path in checkpoints(folder) if finished_steps(path) > step]
    return [f"{path} is not used: it is now {_set_aside(path).name}" for path in later]


def _set_aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.aside-{number}") for number in range(1, 1 << 30))
    return path.rename(next(name for name in names if not name.exists()))


def _checked(path: Path) -> tuple[Saved | None, str]:
    """A checkpoint, or the fault of its index or of this rank's part of its files."""
    try:
        saved = Saved(path)
        saved.check_files(*c10d.place())
    except (RunError, OSError) as error:
        return None, reason(error)
    return saved, ""


def _opened(
    path: Path | Saved, boxes: list[Box], padded_rows: Mapping[str, int]
) -> tuple[Saved, list[Box]]:
    """A checkpoint, and those of the boxes that are filled from it."""
    saved = opened(path)
    saved.repad(padded_rows)
    there = saved.tensors()
    filled = [box for box in boxes if box.key in there or box.key not in ADAPTED]
    saved.check(filled)
    return saved, filled


@dataclass(frozen=True, eq=False, slots=True)
class _Saving:
    """One rank's share in a save: three stages, each begun when all ranks have done the one
    before.
    """

    made: Path
    step: int
    own: Mapping[str, Box]
    rank: int
    world: int
    disk: Disk
    run: Identity
    allowed: Callable[[], None]

    def told(self, stage: Callable[[], None]) -> None:
        """A stage, whose failure says which of several ranks met it."""
        try:
            stage()
        except (RunError, OSError) as error:
            raise RunError(
                f"rank {self.rank}: {reason(error)}" if self.world > 1 else reason(error)
            ) from None

    @property
    def part(self) -> Path:
        """The folder while it is not whole."""
        return self.made.with_suffix(".tmp")

    def prepare(self) -> None:
        """An empty folder, and none that a crash left."""
        if self.rank > 0:
            return
        self.allowed()
        if self.made.exists():
            raise RunError(f"{self.made} is there already: a checkpoint is never written over")
        for left in self.made.parent.glob("step-*.tmp"):
            self.disk.remove(left)
        self.part.mkdir(parents=True)

    def write(self) -> None:
        """This rank's boxes, and what they are."""
        name = _rank_name(self.rank)
        mine = index.Index(self.step, {}, {})
        if self.own:
            tensors = {tensor: box.tensor for tensor, box in self.own.items()}
            stamp = tensor_file.write(self.part / f"{name}.safetensors", tensors, self.disk)
            mine = index.of(self.step, f"{name}.safetensors", self.own, stamp)
        put(self.part / f"{name}.json", [index.text(mine)], self.disk)
        settle(self.part, self.disk)

    def publish(self) -> None:
        """One index for all; the folder's name."""
        if self.rank > 0:
            return
        self.allowed()
        put(self.part / INDEX, [index.text(replace(self._merged(), run=self.run))], self.disk)
        for rank in range(self.world):
            (self.part / f"{_rank_name(rank)}.json").unlink()
        settle(self.part, self.disk)
        self.disk.rename(self.part, self.made)
        try:
            settle(self.made.parent, self.disk)
        except OSError:
            self.made.rename(self.part)  # so that it does not count, and can be tried anew
            raise

    def _merged(self) -> index.Index:
        """All ranks' parts as one.  RunError where one is not to be seen from here."""
        files = [self.part / f"{_rank_name(rank)}.json" for rank in range(self.world)]
        if lost := [str(rank) for rank, file in enumerate(files) if not file.exists()]:
            raise RunError(
                f"{self.part} lacks what rank {named(lost)} wrote: is it one folder for all nodes?"
            )
        merged = index.merged([index.parsed(file.read_bytes()) for file in files])
        fault = index.faults(merged, merged.tensors)
        assert not fault, f"checkpoint: {fault}"
        for name, stamp in merged.files.items():
            if (self.part / name).stat().st_size != stamp.size:
                raise RunError(
                    f"{self.part / name} does not have the {stamp.size} bytes that were written"
                )
        return merged


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"
