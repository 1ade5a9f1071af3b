"""A run's checks of its values, as `watch { … }` of its plan asks for them."""

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
    """Checks around each step: always whether it is finite, and others that the plan asks for."""

    def __init__(
        self,
        watch: Watch,
        model: nn.Module,
        state: TrainState,
        train_step: TrainStep,
        batch: Callable[[int], Batch],
        log: Log,
        inputs: Mapping[str, Input],
    ) -> None:
        """`train_step` is the program's own, `batch` gives the batch of a step, from 0; `inputs`
        describes its tensors.
        """
        self._asked, self._model, self._state, self._log = watch, model, state, log
        self._train_step, self._batch, self._number = train_step, batch, 0
        located = self._locate if watch.locate else _advise_to_locate
        self._finite = Finite(state, watch.finite, watch.skips, located)
        if watch.skips:
            state.replicated_values += state.hold.get_checkpoint_values()
        if watch.spikes:
            state.replicated_values += state.losses.get_checkpoint_values()
        if watch.copies or watch.replay:
            from ..debug.compare import Comparison
            from ..debug.twice import CopyCheck, Replay  # most runs do without

            comparison = Comparison(state.mesh.device)
            self._copies = CopyCheck(model, state, inputs, comparison)
            self._replay = Replay(state, train_step, comparison)

    def step(
        self, number: int, batch: Batch, lr: float, run: TrainStep, begin: Callable[[], None]
    ) -> Metrics:
        """Runs step `number` (from 1) by `run`, with the checks that are due in it.  RunError on
        all ranks where a value is wrong.

        `begin` is called when a step that has begun does so for the second time.
        """
        if _is_due(number, self._asked.copies) or _is_due(number, self._asked.replay):
            self._log.note_observed(number)
        if _is_due(number, self._asked.copies):
            self._copies.begin(batch)
            self._state.looks.append(self._compare)
            self._number = number
        if _is_due(number, self._asked.replay):
            metrics = self._replay.step(number, self._model, batch, lr, run, begin)
        else:
            metrics = run(self._model, self._state, batch, lr)
        if self._asked.spikes:
            return self._with_limit(metrics, self._asked.spikes)
        return metrics

    def _with_limit(self, metrics: Metrics, deviations: float) -> Metrics:
        """The metrics with the limit of the loss; above it the program may have skipped the step.

        A loss above the limit does not count for the next limit.
        """
        limit = self._state.loss_limit(deviations) if metrics.limit is None else metrics.limit
        self._state.losses.add(metrics.loss, (metrics.tokens > 0) & (metrics.loss <= limit))
        return replace(metrics, limit=limit)

    def _compare(self) -> None:
        """Compares copies once, before the next update."""
        self._state.looks.remove(self._compare)
        self._copies.compare(self._number)

    def after(self, steps_done: int, metrics: Metrics) -> None:
        """Takes note of a step that has been handed to the device.

        RunError on all ranks where a step before it ends the run.
        """
        self._tell_log(self._finite.after(steps_done, metrics))

    def settle(self) -> None:
        """Waits for the last step; call it before a save."""
        self._tell_log(self._finite.settle())

    def _tell_log(self, bad: Bad | None) -> None:
        if bad is not None and bad.row:
            self._log.note_skipped(bad.step, str(bad))
        elif bad is not None:
            self._log.say(str(bad))

    def _locate(self, step: int) -> str:
        """Words for the first value of a step that is not finite, on any rank.

        All ranks run the step once more to find it.
        """
        from ..debug.first_value import FirstValue  # the run ends, so its time does not matter

        stored_key = ""
        for box in self._state.boxes():
            if not bool(box.tensor.isfinite().all()):
                stored_key = box.key
                break
        first_value = FirstValue(self._model, self._train_step.__code__.co_filename)
        with first_value:
            self._train_step(
                self._model, self._state, self._batch(step - 1).to(self._state.mesh.device), 0.0
            )
        place, word = first_value.found, ""
        if stored_key:
            place = f"`{stored_key}` of the state"
        if place:
            rank, _ = c10d.place()
            line = f"first value not finite: {place}, rank {rank}"
            # sorted by this, a value of the state comes first, then the earliest of the step
            word = json.dumps([not stored_key, *first_value.order, line])
        lines_of_ranks = sorted(json.loads(text) for text in meet("first value", word) if text)
        if lines_of_ranks:
            return lines_of_ranks[0][-1]
        return "all values of its forward and backward were finite when it was run once more"


def _advise_to_locate(_step: int) -> str:
    return "`watch { locate = on }` in the plan names the first value that is not finite"


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0
