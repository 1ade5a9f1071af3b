"""A run's looks at its values, as `watch { … }` of its plan asks for them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from ..comm import c10d
from ..comm.store import meet
from ..config.plan import Metrics, Watch
from ..data.loader import Batch, Input
from ..state.engine import TrainState
from .finite import Bad, Finite
from .log import Log

TrainStep = Callable[[nn.Module, TrainState, Batch, float], Metrics]


class Watching:
    """Around each step: whether it is finite, always; what else the plan asks for."""

    def __init__(
        self,
        asked: Watch,
        model: nn.Module,
        state: TrainState,
        train_step: TrainStep,
        batch: Callable[[int], Batch],
        log: Log,
        inputs: Mapping[str, Input],
    ) -> None:
        """`train_step` is the program's own, `batch` gives the one of a step, from 0; `inputs`
        says what is in it.
        """
        self._asked, self._model, self._state, self._log = asked, model, state, log
        self._train_step, self._batch, self._number = train_step, batch, 0
        located = self._located if asked.locate else _advise_to_locate
        self._finite = Finite(state, asked.finite, asked.skips, located)
        state.kept += [
            *(state.held.kept() if asked.skips else ()),
            *(state.losses.kept() if asked.spikes else ()),
        ]
        if asked.copies or asked.replay:
            from ..debug.compare import Comparison
            from ..debug.twice import CopyCheck, Replay  # most runs do without

            comparison = Comparison(state.mesh.device)
            self._copies = CopyCheck(model, state, inputs, comparison)
            self._replay = Replay(state, train_step, comparison)

    def step(
        self, number: int, batch: Batch, lr: float, run: TrainStep, begin: Callable[[], None]
    ) -> Metrics:
        """Step `number` (from 1) by `run`, and what is due in it.  RunError on all ranks where a
        value is wrong.

        `begin` is told that a step which has begun does so for the second time.
        """
        if _is_due(number, self._asked.copies) or _is_due(number, self._asked.replay):
            self._log.looked(number)
        if _is_due(number, self._asked.copies):
            self._copies.begin(batch)
            self._state.looks.append(self._compare)
            self._number = number
        if _is_due(number, self._asked.replay):
            metrics = self._replay.step(number, self._model, batch, lr, run, begin)
        else:
            metrics = run(self._model, self._state, batch, lr)
        return self._limited(metrics, self._asked.spikes) if self._asked.spikes else metrics

    def _limited(self, metrics: Metrics, deviations: float) -> Metrics:
        """The metrics with their limit, by which the program may have skipped the step; a spike
        is not in the next.
        """
        limit = self._state.loss_limit(deviations) if metrics.limit is None else metrics.limit
        self._state.losses.add(metrics.loss, (metrics.tokens > 0) & (metrics.loss <= limit))
        return replace(metrics, limit=limit)

    def _compare(self) -> None:
        """Once, before the next update."""
        self._state.looks.remove(self._compare)
        self._copies.compare(self._number)

    def after(self, done: int, metrics: Metrics) -> None:
        """A step that has been handed to the device.

        RunError on all ranks where one before it ends the run.
        """
        self._told(self._finite.after(done, metrics))

    def settle(self) -> None:
        """Waits for the last step, before which nothing is saved."""
        self._told(self._finite.settle())

    def _told(self, bad: Bad | None) -> None:
        if bad is not None and bad.row:
            self._log.skipped(bad.step, str(bad))
        elif bad is not None:
            self._log.say(str(bad))

    def _located(self, step: int) -> str:
        """The first value of a step that is not finite: of its last run, on any rank; all ranks
        run it once more.
        """
        from ..debug.first_value import FirstValue  # the run ends

        stored = next(
            (box.key for box in self._state.boxes() if not bool(box.tensor.isfinite().all())), ""
        )
        seen = FirstValue(self._model, self._train_step.__code__.co_filename)
        with seen:
            self._train_step(
                self._model, self._state, self._batch(step - 1).to(self._state.mesh.device), 0.0
            )
        rank, _ = c10d.place()
        found = f"`{stored}` of the state" if stored else seen.found
        word = (
            json.dumps([not stored, *seen.order, f"first value not finite: {found}, rank {rank}"])
            if found
            else ""
        )
        said = sorted(json.loads(each) for each in meet("first value", word) if each)
        return (
            said[0][-1]
            if said
            else "all values of its forward and backward were finite when it was run once more"
        )


def _advise_to_locate(_step: int) -> str:
    return "`watch { locate = on }` in the plan names the first value that is not finite"


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0
