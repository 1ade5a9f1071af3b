"""Saves beside training: a step's state is copied to host memory between steps, and a thread writes
the copy.

The threads of the ranks meet at the job's store, never in a collective.  A thread keeps its lines
for the main thread, which asks for them after each step.
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
from .host_copy import copy_boxes, find_lack_of_room, host_memory
from .index import Identity
from .saver import Keep, newest, own_boxes, prune, write

PAUSES = (1.0, 10.0)
"""Seconds that a thread pauses before it tries again to write a copy; after the last try it leaves
the rest to the next save.
"""

_NAME = "save"
_LONG = 1.0  # seconds of waiting that are worth a line


class Saver:
    """Saves a state into step-NNNNNN of a folder, one save at a time.  All ranks call its methods
    in the same order.

    The copy takes as much host memory as the boxes that this rank writes.  The memory is reused
    from save to save.
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
        store = job_store()
        # the saver's thread needs a client of its own: a client waits with its lock taken
        self._store = store.clone() if store else None
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
        """Finishes the save under way.

        Not where the run ends by a mistake: other ranks may be gone then.
        """
        if kind is None or issubclass(kind, RunError | KeyboardInterrupt):
            self._join()

    def begin(self, step: int) -> None:
        """Waits for the previous save, copies the state after `step` steps, and leaves the rest to
        a thread.

        The state is saved only if all its values are finite.
        """
        began = monotonic()
        self.wait()
        waited = monotonic() - began
        if waited > _LONG:
            self._lines.append(
                f"the save of step {step} has waited {waited:.0f} s for the one before"
            )
        if step == self._step and not self._failed:  # this step is saved already
            return
        self._step, self._failed = step, False
        boxes = own_boxes(self._state)
        if self._memory is None:
            self._memory = self._room_for(boxes)
        if not self._copies:
            self._run_thread(step, boxes)
            return
        copies = copy_boxes(boxes, self._memory)
        self._thread = Thread(
            target=self._run_thread, args=(step, copies), name="saver", daemon=True
        )
        self._thread.start()

    def _room_for(self, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
        """Host memory for the copies, by the boxes' names.

        Empty where a node has too little: then training waits for each save.
        """
        size = sum(box.tensor.nbytes for box in boxes.values())
        if fault := find_lack_of_room(size):
            self._copies = False
            self._lines.append(f"training waits for each save, since it cannot be copied: {fault}")
            return {}
        self._lines.append(
            f"saves keep a copy of this rank's state in host memory, {size / 2**20:,.2f} MiB"
        )
        memory, fault = host_memory(boxes)
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
            checkpoint = newest(self.folder)
            if checkpoint:
                remainder = f"the newest checkpoint is {checkpoint}"
            else:
                remainder = "there is no checkpoint"
            raise RunError(f"the last save has failed, and {remainder}")

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ---- of the thread

    def _run_thread(self, step: int, boxes: Mapping[str, Box]) -> None:
        try:
            if fault := self._agree_on_fault(step, boxes):
                self._fault, self._failed = fault, True
            elif self._try_to_write(step, boxes):
                self._prune()
            else:
                self._failed = True
        except BaseException as error:  # of the main thread, from here on
            self._crash, self._failed = error, True

    def _agree_on_fault(self, step: int, boxes: Mapping[str, Box]) -> str:
        """Why the state is not worth saving, on any rank."""
        fault = ""
        for key, box in boxes.items():
            if not _is_finite(box.tensor):
                fault = f"`{key}` is not finite"
                break
        first_fault = next((word for word in meet(_NAME, fault, self._store) if word), "")
        return first_fault and f"step {step} is not saved, since {first_fault}"

    def _try_to_write(self, step: int, boxes: Mapping[str, Box]) -> bool:
        """Tries to write the boxes, several times; whether a try has succeeded."""
        agree = partial(together, name=_NAME, store=self._store)
        for pause in (*self._pauses, None):
            try:
                self.newest = write(
                    self.folder, step, boxes, self._run, self._disk, agree, self._allowed
                )
                return True
            except RunError as error:
                if pause is None:
                    then = "given up until the next save is due"
                else:
                    then = f"trying again in {pause:.0f} s"
                self._lines.append(f"cannot save step {step}: {error}; {then}")
            if pause is not None:
                sleep(pause)
        return False

    def _prune(self) -> None:
        """Removes old checkpoints.

        A checkpoint that cannot be removed costs space, but does not fail the save.
        """
        try:
            together(lambda: prune(self.folder, self._keep, self._disk), _NAME, self._store)
        except RunError as error:
            self._lines.append(f"cannot remove an old checkpoint: {error}")


def _is_finite(values: Tensor) -> bool:
    """Whether all values are finite.

    Looks at the least and the greatest, which takes no memory of the tensor's size.
    """
    if not values.is_floating_point() or not values.numel():
        return True
    return all(bool(bound.isfinite()) for bound in torch.aminmax(values))
