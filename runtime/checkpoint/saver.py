"""Saves the state of a step atomically, into a folder of its own.

    step-000300/index.json              what is where; size and hash of every file
    step-000300/rank-00002.safetensors  the boxes that rank 2 wrote

A state is saved as boxes of global tensors.  One of the ranks that hold a box writes it; a rank
that loads reads all saved boxes that overlap its own.  So any mesh can load what any other saved.
Files are no pickles, which could run code when they are loaded.

Until all its files are on the disk a checkpoint is called step-NNNNNN.tmp.  A crash leaves at most
such a folder, which the next save removes, and does not touch whole checkpoints.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..comm import c10d
from ..comm.store import meet
from ..errors import RunError, quote_first_names, reason
from ..state.engine import TrainState
from ..state.shards import Box
from ..state.skips import Losses, LossScale, UpdateHold
from . import index, tensor_file
from .agreement import anywhere, together
from .files import Disk, sync_folder, write_durably
from .index import Identity
from .reader import INDEX, Saved, folder_name, open_saved

_NAMED = 4  # checkpoints in a line
ADAPTED = (*LossScale.KEYS, *Losses.KEYS, *UpdateHold.KEYS)
"""Keys of state that a run can begin anew, as when it goes on with another precision, or watches
other things.
"""


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay when newer ones are saved: the `newest` ones, and one each `every`
    steps; no such one where `every` is 0.
    """

    newest: int = 2
    every: int = 0

    def find_old(self, paths: Sequence[Path]) -> list[Path]:
        """The paths to remove of all, oldest first."""
        old_paths = paths[: -self.newest]
        if not self.every:
            return [*old_paths]
        return [path for path in old_paths if get_finished_steps(path) % self.every]


def save(
    folder: Path,
    step: int,
    state: TrainState,
    disk: Disk | None = None,
    run: Identity | None = None,
) -> Path:
    """Writes `folder`/step-NNNNNN, then removes all but the newest two.  Collective.

    `step` counts finished steps.  `run` are settings that a run that goes on must have too.

    RunError, on all ranks, where the disk of one refuses, or this step was saved before.
    """
    disk = disk or Disk()
    path = write(folder, step, own_boxes(state), run or {}, disk)
    together(lambda: prune(folder, Keep(), disk))
    return path


def own_boxes(state: TrainState) -> dict[str, Box]:
    """The boxes that this rank writes, by their names in its file."""
    boxes = dict[str, Box]()
    for box in state.boxes():
        if box.is_own and box.tensor.numel():
            boxes[box.name] = box
    return boxes


def write(
    folder: Path,
    step: int,
    boxes: Mapping[str, Box],
    run: Identity,
    disk: Disk,
    agree: Callable[[Callable[[], None]], None] = together,
    allowed: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `folder`/step-NNNNNN, made of all ranks' own boxes.  Collective.

    `agree` is `together`, with its arguments.  RunError on all ranks, with the number of the first
    of several that failed; also where `allowed` raises one on rank 0.
    """
    rank, world = c10d.place()
    saving = _Saving(folder / folder_name(step), step, boxes, rank, world, disk, run, allowed)
    for stage in (saving.prepare, saving.write, saving.publish):
        agree(partial(saving.run_stage, stage))
    return saving.target


def prune(folder: Path, keep: Keep, disk: Disk) -> None:
    """Has rank 0 remove old checkpoints.  RunError or OSError."""
    if c10d.place()[0] > 0:
        return
    for old in keep.find_old(checkpoints(folder)):
        gone = old.with_suffix(".tmp")  # renamed first: no checkpoint is ever there in part
        disk.rename(old, gone)
        disk.remove(gone)


def load(
    path: Path | Saved, state: TrainState, padded_rows: Mapping[str, int] | None = None
) -> None:
    """Fills the state from a checkpoint written on any mesh, and closes it.  Collective.

    `padded_rows` has the rows of padded parameters without padding; the checkpoint may have more
    or less padding.  A loss scale or a window of losses that the checkpoint lacks begins anew, and
    one that the state has no use for is ignored.  RunError, on all ranks and before anything is
    changed, where one cannot read what it needs.
    """
    saved, boxes = together(lambda: _open_for_boxes(path, [*state.boxes()], padded_rows or {}))
    keys = [key for key in saved.tensors() if key not in ADAPTED]
    box_keys = {box.key for box in boxes}
    # a tensor is used if a rank fills a box from it
    used = anywhere([key in box_keys for key in keys])
    extra = [key for key, is_used in zip(keys, used, strict=True) if not is_used]
    if extra:
        raise RunError(f"{path} has {quote_first_names(extra)}, which the plan has not")
    for target, source in together(lambda: saved.copies(boxes)):
        target.copy_(source)
    saved.close()
    state.refresh()


def newest(folder: Path) -> Path | None:
    """The last checkpoint in a folder."""
    return next(reversed(checkpoints(folder)), None)


def get_finished_steps(path: Path) -> int:
    """The number of steps that a checkpoint has finished."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(paths, key=get_finished_steps)


def newest_whole(folder: Path) -> tuple[Saved | None, list[str]]:
    """The last checkpoint in a folder that is whole, and a line for each newer one that is not.
    Collective.

    Each rank reads a part of the files, so that every file is read and hashed once.  RunError, on
    all ranks, where ranks see different checkpoints, or there are some but none is whole.
    """
    paths = together(lambda: checkpoints(folder))
    names_of_ranks = meet("checkpoints", " ".join(path.name for path in paths))
    if len(names_of_ranks) > 1:
        lines = list[str]()
        for names, ranks in names_of_ranks.items():
            last_names = " ".join(names.split()[-_NAMED:])
            lines.append(f"rank {ranks[0]} sees {last_names or 'none'}")
        raise RunError(
            f"ranks see other checkpoints in {folder}: is it one folder for all nodes?", *lines[:2]
        )
    notes = list[str]()
    for path in reversed(paths):
        saved, rank_fault = _check_own_part(path)
        fault = "; ".join(word for word in meet("whole", rank_fault) if word)
        if saved and not fault:
            saved.mark_checked()
            return saved, notes
        notes.append(f"{path} is damaged: {fault}")
    if notes:
        raise RunError(f"no checkpoint in {folder} is whole", *notes)
    return None, []


def set_aside(folder: Path, step: int) -> list[str]:
    """Renames checkpoints of later steps, so that no run reads them; a line for each.

    A run that goes on from `step` will save these steps again.
    """
    lines = list[str]()
    for path in checkpoints(folder):
        if get_finished_steps(path) > step:
            lines.append(f"{path} is not used: it is now {_set_aside(path).name}")
    return lines


def _set_aside(path: Path) -> Path:
    """Gives a checkpoint the first free name of the form step-NNNNNN.aside-N."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return path.rename(aside)


def _check_own_part(path: Path) -> tuple[Saved | None, str]:
    """A checkpoint and "", or None and the fault of its index or this rank's part of its files."""
    try:
        saved = Saved(path)
        saved.check_files(*c10d.place())
    except (RunError, OSError) as error:
        return None, reason(error)
    return saved, ""


def _open_for_boxes(
    path: Path | Saved, boxes: list[Box], padded_rows: Mapping[str, int]
) -> tuple[Saved, list[Box]]:
    """A checkpoint, and the boxes that it can fill."""
    saved = open_saved(path)
    saved.repad(padded_rows)
    saved_tensors = saved.tensors()
    to_fill = [box for box in boxes if box.key in saved_tensors or box.key not in ADAPTED]
    saved.check(to_fill)
    return saved, to_fill


@dataclass(frozen=True, eq=False, slots=True)
class _Saving:
    """One rank's share in a save: three stages, and each begins when all ranks have done the one
    before.
    """

    target: Path
    step: int
    boxes: Mapping[str, Box]
    rank: int
    world: int
    disk: Disk
    run: Identity
    allowed: Callable[[], None]

    def run_stage(self, stage: Callable[[], None]) -> None:
        """Runs a stage; an error of one of several ranks says which rank met it."""
        try:
            stage()
        except (RunError, OSError) as error:
            line = reason(error)
            if self.world > 1:
                line = f"rank {self.rank}: {line}"
            raise RunError(line) from None

    @property
    def part(self) -> Path:
        """The folder while it is not whole."""
        return self.target.with_suffix(".tmp")

    def prepare(self) -> None:
        """Makes an empty folder, and removes folders that a crash left."""
        if self.rank > 0:
            return
        self.allowed()
        if self.target.exists():
            raise RunError(f"{self.target} is there already: a checkpoint is never written over")
        for leftover in self.target.parent.glob("step-*.tmp"):
            self.disk.remove(leftover)
        self.part.mkdir(parents=True)

    def write(self) -> None:
        """Writes this rank's boxes, and their index."""
        name = _rank_name(self.rank)
        mine = index.Index(self.step, {}, {})
        if self.boxes:
            tensors = {tensor: box.tensor for tensor, box in self.boxes.items()}
            stamp = tensor_file.write(self.part / f"{name}.safetensors", tensors, self.disk)
            mine = index.make_index(self.step, f"{name}.safetensors", self.boxes, stamp)
        write_durably(self.part / f"{name}.json", [index.to_json(mine)], self.disk)
        sync_folder(self.part, self.disk)

    def publish(self) -> None:
        """Writes one index for all ranks, and gives the folder its name."""
        if self.rank > 0:
            return
        self.allowed()
        write_durably(
            self.part / INDEX,
            [index.to_json(replace(self._merge_indices(), run=self.run))],
            self.disk,
        )
        for rank in range(self.world):
            (self.part / f"{_rank_name(rank)}.json").unlink()
        sync_folder(self.part, self.disk)
        self.disk.rename(self.part, self.target)
        try:
            sync_folder(self.target.parent, self.disk)
        except OSError:
            self.target.rename(self.part)  # so that it does not count, and can be tried anew
            raise

    def _merge_indices(self) -> index.Index:
        """The index of all ranks' parts.  RunError where this rank cannot see one of them."""
        files = [self.part / f"{_rank_name(rank)}.json" for rank in range(self.world)]
        unseen = [str(rank) for rank, file in enumerate(files) if not file.exists()]
        if unseen:
            raise RunError(
                f"{self.part} lacks what rank {quote_first_names(unseen)} wrote:"
                " is it one folder for all nodes?"
            )
        merged = index.merge([index.parse(file.read_bytes()) for file in files])
        fault = index.find_fault(merged, merged.tensors)
        assert not fault, f"checkpoint: {fault}"
        for name, stamp in merged.files.items():
            if (self.part / name).stat().st_size != stamp.size:
                raise RunError(
                    f"{self.part / name} does not have the {stamp.size} bytes that were written"
                )
        return merged


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"
