"""`watch { copies  replay }`: what ranks hold alike is compared, and steps are run twice and compared to the last bit.

Ranks compare hashes by the job's store, in which no group of the plan takes part; a step that is run twice does its own
collectives twice.  Only where hashes differ do ranks exchange values, to find the first, and then the run ends.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from socket import gethostname
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..comm.mesh import Axis, Copies
from ..comm.store import job_store, meet
from ..config.plan import Metrics
from ..data.loader import Batch
from ..errors import RunError
from ..state.engine import TrainState
from .compare import Comparison
from .source_lines import first_use

TrainStep = Callable[[nn.Module, TrainState, Batch, float], Metrics]


class CopyCheck:
    """Compares parameters, optimizer state, working copies and reduced gradients over the ranks that hold them."""

    def __init__(self, model: nn.Module, state: TrainState) -> None:
        self._model, self._comparison = model, Comparison(state.mesh.device)
        self._by_axis: dict[Axis, list[Copies]] = {}
        for each in state.copies():
            if each.axis.size > 1:
                self._by_axis.setdefault(each.axis, []).append(each)

    def compare(self, step: int) -> None:
        """RunError on all ranks, with the first element that differs.  All ranks call it before the same update."""
        differing = [self._differs(step, axis, copies) for axis, copies in self._by_axis.items()]
        found = meet("copies", "differ" if any(differing) else "")
        self._forget(step)
        if [*found] != [""]:
            _end(f"step {step}", [self._first(axis, copies) for axis, copies in self._by_axis.items()])

    def _differs(self, step: int, axis: Axis, copies: Sequence[Copies]) -> bool:
        """Whether this rank has other values than the rank of the axis that came first."""
        hashes = self._comparison.hashes([each.tensor for each in copies]).cpu()
        own = blake2b(hashes.numpy().tobytes(), digest_size=16).hexdigest()
        return job_store().compare_set(_key(step, axis), "", own).decode() != own

    def _forget(self, step: int) -> None:
        for axis in self._by_axis:
            if axis.rank == 0:
                job_store().delete_key(_key(step, axis))

    def _first(self, axis: Axis, copies: Sequence[Copies]) -> str:
        """The first element that differs over the axis; "" if none does."""
        difference = self._comparison.first([each.tensor for each in copies], axis)
        if difference is None:
            return ""
        held = copies[difference.number]
        parameter, index = held.element(difference.index or 0)
        place = first_use(self._model, parameter)
        used = f"; used at {place}" if place else ""
        return f"{held.what}{parameter}{index} is not the same over {axis.name}: {difference.ranks}{used}"


class Replay:
    """Runs a step twice from one state, and compares loss, norm and each bucket's gradients."""

    def __init__(self, state: TrainState, train_step: TrainStep) -> None:
        """`train_step` is that of the program, which nothing else watches."""
        self._state, self._train_step, self._comparison = state, train_step, Comparison(state.mesh.device)

    def step(
        self, number: int, model: nn.Module, batch: Batch, lr: float, run: TrainStep, begin: Callable[[], None]
    ) -> Metrics:
        """Step `number` by `run`, after the same without an update.  RunError on all ranks where a bit differs."""
        self._state.held.paused = True
        try:
            with _disable_current_modes():  # a recorder's: the step is recorded once
                first, _ = self._seen(self._train_step, model, batch, lr)
        finally:
            self._state.held.paused = False
        begin()
        second, metrics = self._seen(run, model, batch, lr)
        other = [name for name, hashes in first.items() if not torch.equal(hashes, second[name])]
        rank = dist.get_rank() if dist.is_initialized() else 0
        told = f"run twice, rank {rank} on {gethostname()} has another {', '.join(other)}" if other else ""
        _end(f"step {number}", [told])
        return metrics

    def _seen(self, run: TrainStep, model: nn.Module, batch: Batch, lr: float) -> tuple[Mapping[str, Tensor], Metrics]:
        """Hashes by name, and the step's metrics."""
        seen: dict[str, Tensor] = {}

        def look() -> None:
            for name, flat in self._state.gradients().items():
                flats = cast("list[Tensor]", flat) if isinstance(flat, list) else [flat]
                seen[f"gradient of bucket `{name}`"] = self._comparison.hashes(flats)

        self._state.looks.append(look)
        try:
            metrics = run(model, self._state, batch, lr)
        finally:
            self._state.looks.remove(look)
        values = {"loss": metrics.loss, "gradient norm": metrics.norm}
        return {k: self._comparison.hashes([v]) for k, v in values.items() if v is not None} | seen, metrics


def _end(when: str, found: Sequence[str]) -> None:
    """RunError on all ranks, with what the first that has found something says."""
    own = next(filter(None, found), "")
    if told := [each for each in meet("watch", own) if each]:
        raise RunError(f"{when}: {told[0]}", *told[1:4])


def _key(step: int, axis: Axis) -> str:
    return f"copies/{step}/{axis.name}/{axis.ranks()[0]}"
