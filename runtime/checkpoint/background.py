"""Saves beside training: a step's state is copied to host memory between steps, and a thread writes
the copy.

The thread meets those of the other ranks at the job's store, never in a collective.  It has its
lines ready for the main thread, which asks for them after each step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from types import TracebackType

import torch
from torch import Tensor

from ..comm.store import job_store, meet
from ..errors import RunError
from ..state.engine import TrainState
from ..state.shards import Box
from .agreement import together
from .files import Disk
from .host_copy import copied, host_memory, room
from .index import Identity
from .saver import Keep, newest, own_boxes, prune, write

PAUSES = (1.0, 10.0)
"""Seconds after which a thread whose copy was not written tries anew; then the next save is the
next chance.
"""

_NAME = "save"
_LONG = 1.0  # seconds of waiting that are worth a line


class Saver:
    """Saves a state into step-NNNNNN of a folder, one save at a time.  All ranks call its methods
    in one order.

    The copy takes as much host memory as the boxes that this rank writes, and is kept from save to
    save.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainState,
        run: Identity,
        keep: Keep,
        allowed: Callable[[], None] = lambda: None,
        disk: Disk | None = None,
    ) -> None:
        """`allowed` raises RunError on rank 0 where this run may no longer write to the folder."""
        self.folder, self._state, self._run, self._keep = folder, state, run, keep
        self._allowed, self._disk, self._pauses = allowed, disk or Disk(), PAUSES
        self._memory: dict[str, Tensor] | None = None
        self._copies = True
        self._store = store.clone() if (store := job_store()) else None
        self._thread: Thread | None = None
        self._lines, self._step = list[str](), -1
        self._crash: BaseException | None = None
        self.newest = folder
        """The last checkpoint that this saver has made; the folder before the first."""
        self._failed, self._fault = False, ""

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        """The save under way is finished, unless the run ends by a mistake, for which the other
        ranks may be gone.
        """
        if kind is None or issubclass(kind, RunError | KeyboardInterrupt):
            self._join()

    def begin(self, step: int) -> None:
        """Copies the state after `step` steps, and leaves the rest to a thread; waits first for the
        save before.

        The state is saved only if all its values are finite.
        """
        began = monotonic()
        self.wait()
        if (waited := monotonic() - began) > _LONG:
            self._lines.append(
                f"the save of step {step} has waited {waited:.0f} s for the one before"
            )
        if step == self._step and not self._failed:
            return
        self._step, self._failed = step, False
        own = own_boxes(self._state)
        if self._memory is None:
            self._memory = self._room_for(own)
        if not self._copies:
            self._run_thread(step, own)
            return
        own = copied(own, self._memory)
        self._thread = Thread(target=self._run_thread, args=(step, own), name="saver", daemon=True)
        self._thread.start()

    def _room_for(self, own: Mapping[str, Box]) -> dict[str, Tensor]:
        """Host memory for the copies; none where a node has too little, and then saves are not
        beside training.
        """
        size = sum(box.tensor.nbytes for box in own.values())
        if fault := room(size):
            self._copies = False
            self._lines.append(f"training waits for each save, since it cannot be copied: {fault}")
            return {}
        self._lines.append(
            f"saves keep a copy of this rank's state in host memory, {size / 2**20:,.2f} MiB"
        )
        memory, fault = host_memory(own)
        if fault:
            self._lines.append(
                f"this copy takes longer, since CUDA does not pin its memory: {fault}"
            )
        return memory

    def wait(self) -> None:
        """Waits until the save under way is done, or has failed."""
        self._join()
        if self._crash is not None:
            raise self._crash

    def news(self) -> list[str]:
        """Lines since the last time, about saves that met trouble."""
        lines, self._lines = self._lines, []
        return lines

    def check(self) -> None:
        """RunError where a state was not worth saving."""
        if self._fault:
            raise RunError(f"{self._fault}; try a lower --lr")

    def require(self) -> None:
        """RunError where the last save, which is awaited, has failed."""
        if self._failed:
            found = newest(self.folder)
            there = f"the newest checkpoint is {found}" if found else "there is no checkpoint"
            raise RunError(f"the last save has failed, and {there}")

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ---- of the thread

    def _run_thread(self, step: int, own: Mapping[str, Box]) -> None:
        try:
            if fault := self._agreed_fault(step, own):
                self._fault, self._failed = fault, True
            elif self._written(step, own):
                self._prune()
            else:
                self._failed = True
        except BaseException as error:  # of the main thread, from here on
            self._crash, self._failed = error, True

    def _agreed_fault(self, step: int, own: Mapping[str, Box]) -> str:
        """Why the state is not worth saving, on any rank."""
        found = next(
            (f"`{key}` is not finite" for key, box in own.items() if not _is_finite(box.tensor)), ""
        )
        first = next((word for word in meet(_NAME, found, self._store) if word), "")
        return first and f"step {step} is not saved, since {first}"

    def _written(self, step: int, own: Mapping[str, Box]) -> bool:
        """Whether one of some tries has succeeded."""
        agree = partial(together, name=_NAME, store=self._store)
        for pause in (*self._pauses, None):
            try:
                self.newest = write(
                    self.folder, step, own, self._run, self._disk, agree, self._allowed
                )
                return True
            except RunError as error:
                then = (
                    "given up until the next save is due"
                    if pause is None
                    else f"trying again in {pause:.0f} s"
                )
                self._lines.append(f"cannot save step {step}: {error}; {then}")
            if pause is not None:
                sleep(pause)
        return False

    def _prune(self) -> None:
        """Removes old checkpoints.  One that stays costs space, not the save."""
        try:
            together(lambda: prune(self.folder, self._keep, self._disk), _NAME, self._store)
        except RunError as error:
            self._lines.append(f"cannot remove an old checkpoint: {error}")


def _is_finite(values: Tensor) -> bool:
    """Whether all values are; takes no memory."""
    if not values.is_floating_point() or not values.numel():
        return True
    return all(bool(each.isfinite()) for each in torch.aminmax(values))
