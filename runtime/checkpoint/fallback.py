"""Finds the newest checkpoint that is whole, for all ranks alike; one that is damaged is told, and kept apart."""

from pathlib import Path

from ..comm import c10d
from ..comm.store import meet
from ..errors import RunError, reason
from .agreement import together
from .reader import Saved
from .saver import checkpoints, finished_steps

_NAMED = 4  # checkpoints in a line


def newest_whole(folder: Path) -> tuple[Saved | None, list[str]]:
    """The last checkpoint in a folder that is whole, and a line for each newer one that is not.  Collective.

    Each rank reads a part of the files, so that each is read and hashed once.  RunError, on all ranks, where they see
    other checkpoints, or there are some but none is whole.
    """
    paths = together(lambda: checkpoints(folder))
    seen = meet("checkpoints", " ".join(path.name for path in paths))
    if len(seen) > 1:
        words = [f"rank {ranks[0]} sees {' '.join(word.split()[-_NAMED:]) or 'none'}" for word, ranks in seen.items()]
        raise RunError(f"ranks see other checkpoints in {folder}: is it one folder for all nodes?", *words[:2])
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
    """Gives checkpoints of later steps, which a run does not go on from, names that no run reads; a line for each."""
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
