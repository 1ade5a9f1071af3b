"""The log of a run: lines on the terminal and JSON lines in the run folder, from rank 0.

Reading a metric waits for the device.  So the metrics of a logged step are copied in the
background, and read when the next step has been handed to the device, which never runs dry.  On the
CPU, where they are there already, they are read at once.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..config.plan import Account, Metrics
from ..errors import count_with_noun
from .allocator import Peak, line
from .log_file import NAME, LogFile
from .progress import Progress
from .sinks import Sinks
from .speed import Speed


@dataclass(frozen=True)
class _Due:
    """A step to be logged: its metrics on their way to the CPU, and the event after which they
    are there.
    """

    step: int
    lr: float
    values: dict[str, Tensor]
    loads: tuple[Tensor, ...]
    copied: torch.cuda.Event | None

    @classmethod
    def begin_copy(
        cls, step: int, metrics: Metrics, lr: float, counts: Mapping[str, Tensor]
    ) -> "_Due":
        """Begins to copy the metrics; `counts` of steps are copied with them."""

        # torch copies to pinned memory where a copy does not block
        def copy(value: Tensor) -> Tensor:
            return value.to("cpu", non_blocking=True)

        values = dict[str, Tensor]()
        for name, value in {**vars(metrics), **counts}.items():
            if isinstance(value, Tensor):
                values[name] = copy(value)
        loads = tuple(map(copy, metrics.loads))
        if not metrics.loss.is_cuda:
            return cls(step, lr, values, loads, None)
        copied = torch.cuda.Event()
        copied.record()
        return cls(step, lr, values, loads, copied)

    def read(self) -> dict[str, float]:
        """The metrics that are single numbers, by name; waits for their step, and for no later
        one.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return {name: value.item() for name, value in self.values.items()}

    def expert_load(self) -> list[list[int]]:
        """After `read`: how many of the step's tokens each expert took, layer by layer."""
        rows = list[list[int]]()
        for load in self.loads:
            rows.extend(cast(Any, load.reshape(-1, load.shape[-1])).tolist())
        return rows

    def get_dropped_share(self, tokens: int, choices: Sequence[int]) -> float | None:
        """After `read`: the fraction of the choices of `tokens` tokens that no expert took.

        `choices` has, for each load, how many experts a token chooses.  None where none can be
        dropped.
        """
        choices_made, choices_taken = 0, 0
        for load, chosen in zip(self.loads, choices, strict=False):
            layers = load.numel() // load.shape[-1]
            choices_made += tokens * chosen * layers
            choices_taken += int(load.sum())
        if not choices_made:
            return None
        return 1 - choices_taken / choices_made


class Log:
    """Writes to the terminal and to `folder`/log.jsonl; with folder None (other ranks) it does
    nothing.
    """

    def __init__(
        self,
        folder: Path | None,
        first: int,
        steps: int,
        speed: Speed,
        choices: Sequence[int] = (),
        warm_up: int = 1,
        progress: Progress | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        """`choices` has, for each load, how many experts a token chooses, where some may be
        dropped.

        The run's first `warm_up` steps, and other steps of the same line, are not compared with the
        prediction.
        """
        self._folder, self._first, self._steps = folder, first, steps
        self._file = LogFile(folder) if folder else None
        self._speed, self._choices, self._warm = speed, choices, first + warm_up
        self._progress, self._sinks = progress, sinks
        # in a run that is profiled, gives the lines that are slower than predicted
        self.slow_lines: Callable[[], str] = str
        self._began = time.monotonic()
        self._last: dict[str, float] = {}
        self._due: _Due | None = None
        self._empty: Tensor | int = 0  # steps so far in which no label counts
        self._overflowed: Tensor | int = 0  # steps since the last line that fp16 has dropped
        self._said_empty = False
        # the last step that was handed over, and the last that was skipped and is not written yet
        self._handed, self._skipped = first, 0
        self.mark(first)

    def mark(self, step: int) -> None:
        """Counts throughput from here: the time before (validation, saving) is no training time."""
        self._marked, self._marked_step = time.monotonic(), step

    def step(self, step: int, metrics: Metrics, lr: float, due: bool = True) -> None:
        """Takes a step, which may not have finished; `due` says whether its line is due."""
        if self._folder is None:
            return
        self._empty = (metrics.tokens == 0) + self._empty
        if metrics.loss_scale is not None and metrics.norm is not None:
            overflows = metrics.loss.isfinite() & ~metrics.norm.isfinite()
            self._overflowed = overflows.long() + self._overflowed
        self._handed = step
        if due:
            counts = {"empty": self._empty, "overflowed": self._overflowed}
            # before the first step that has them, counts are numbers
            tensors = {name: count for name, count in counts.items() if isinstance(count, Tensor)}
            self._due = _Due.begin_copy(step, metrics, lr, tensors)
            self._overflowed = 0
        elif self._progress is not None:
            seconds = (time.monotonic() - self._marked) / (step - self._marked_step)
            self._progress.show(
                step, self._steps, self._get_time_left(step), self._speed.words(seconds)
            )
        if not (due and metrics.loss.is_cuda):
            self.settle()

    def settle(self) -> None:
        """Writes the step that is due, if there is one, and a step that was skipped and has no line
        of its own.
        """
        if self._due is not None:
            due, self._due = self._due, None
            metrics = due.read()
            self._write_step(
                due.step,
                metrics,
                due.lr,
                due.expert_load(),
                due.get_dropped_share(self._speed.tokens, self._choices),
            )
        if 0 < self._skipped <= self._handed:
            self._write({"step": self._skipped, "skipped": True})
            self._skipped = 0

    def _write_step(
        self,
        step: int,
        metrics: dict[str, float],
        lr: float,
        load: list[list[int]],
        dropped: float | None,
    ) -> None:
        loss, norm = metrics["loss"], metrics.get("norm", 0.0)
        is_finite = isfinite(loss) and isfinite(norm)
        skipped = step == self._skipped or (int(metrics["tokens"]) > 0 and not is_finite)
        if step == self._skipped:
            self._skipped = 0
        seconds = (time.monotonic() - self._marked) / (step - self._marked_step)
        warm = self._marked_step >= self._warm
        self.mark(step)
        self._note_empty_steps(step, int(metrics["empty"]))
        self._say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  {_loss_words(metrics)}"
            f"  lr {lr:.2e}{_remarks(metrics, load, dropped, skipped)}"
            f"  {self._speed.words(seconds)}  {self._get_time_left(step)} left"
        )
        self._write(
            {
                "step": step,
                **_record(metrics, load, dropped, skipped),
                "lr": lr,
                "tokens": int(metrics["tokens"]),
                **self._speed.values(seconds),
            }
        )
        if warm and (complaint := self._speed.complaint(seconds)):
            where = self.slow_lines()
            hint = f"most at {where}" if where else "SCALEC_PROFILE=FOLDER tells where"
            self._say(f"{complaint}; {hint}")

    def _note_empty_steps(self, step: int, empty: int) -> None:
        """Says once that there are steps where no label counts: `empty` steps so far."""
        if not empty or self._said_empty:
            return
        self._said_empty = True
        steps = f"{empty} of {step - self._first} steps so far"
        self._say(
            f"note: in {steps} no label counts: they update nothing, and the learning rate goes on"
        )

    def note_observed(self, step: int) -> None:
        """Takes note of a step that is observed, which takes time: its line is not compared with
        the prediction.
        """
        self._warm = max(self._warm, step)

    def note_skipped(self, step: int, words: str) -> None:
        """Takes note of a step that has updated nothing.

        It gets one record: its line's, if a line is due.
        """
        if self._folder is not None:
            self._say(f"{words}: skipped")
            self._skipped = step

    def validation(self, step: int, metrics: Metrics) -> None:
        """Writes the loss on held-out data after `step` steps."""
        if self._folder is None:
            return
        if not int(metrics.tokens):
            self._say(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  validation: no label counts"
            )
            return
        loss = float(metrics.loss)
        self._say(f"step {step:>{len(str(self._steps))}}/{self._steps}  validation loss {loss:.4f}")
        self._write({"step": step, "validation": loss})

    def memory(
        self, step: int, account: tuple[int, int], plan_account: Account, peak: Peak | None
    ) -> None:
        """Writes the memory that a step took of a GPU, beside the least and the most bytes that the
        compiler counts.
        """
        if self._folder is None:
            return
        self._say(line(account, plan_account, peak))
        least, most = account
        record: dict[str, float] = {"step": step, "account": least}
        if most > least:
            record["account_at_worst"] = most
        record["reserve"] = plan_account.reserve
        if peak is not None:
            record |= vars(peak)
        self._write(record)

    def close(self) -> None:
        """Makes room on the terminal for other lines."""
        if self._progress is not None:
            self._progress.clear()

    def say(self, line: str) -> None:
        """Prints a line on the terminal."""
        if self._folder is not None:
            self._say(line)

    def summary(self, saved: Path, further: str, help_: str) -> None:
        """Prints the last lines of a run: its result, where it lies, and what to try next."""
        results = list[str]()
        for name in ("loss", "validation"):
            if name in self._last:
                results.append(f"{name} {self._last[name]:.4f}")
        self.say(
            f"\nfinished {count_with_noun(self._steps, 'step')} in"
            f" {_duration(time.monotonic() - self._began)}: {', '.join(results)}"
        )
        self.say(f"  log         {self._folder}/{NAME}\n  checkpoint  {saved}")
        self.say(f"  train on    {further}\n  all options {help_}")

    def _get_time_left(self, step: int) -> str:
        spent = time.monotonic() - self._began
        return _duration(spent / (step - self._first) * (self._steps - step))

    def _say(self, line: str) -> None:
        try:
            self.close()
            print(line, flush=True)
        except BrokenPipeError:
            # a run goes on though nobody reads its lines: its numbers are in log.jsonl
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write(self, record: Mapping[str, float | list[list[int]]]) -> None:
        assert self._file is not None, "log: only rank 0 writes"
        for key, value in record.items():
            if isinstance(value, int | float):
                self._last[key] = value
        for place in (self._file, self._sinks):
            if place is not None and (trouble := place.write(record)):
                self._say(trouble)


def _loss_words(metrics: Mapping[str, float]) -> str:
    """The loss and the norm of a step, for its line."""
    if not int(metrics["tokens"]):
        return "no label counts"
    return f"loss {metrics['loss']:.4f}  norm {metrics.get('norm', 0.0):.3f}"


def _remarks(
    metrics: Mapping[str, float], load: list[list[int]], dropped: float | None, skipped: bool
) -> str:
    """The words of a step's line about its loss scale, skipped steps and experts."""
    words = ""
    if "loss_scale" in metrics:
        words += f"  scale {metrics['loss_scale']:g}"
    words += _skip_words(skipped, int(metrics.get("overflowed", 0)))
    words += _spread(load)
    if dropped is not None:
        words += f"  dropped {dropped:.1%}"
    return words


def _record(
    metrics: Mapping[str, float], load: list[list[int]], dropped: float | None, skipped: bool
) -> dict[str, float | list[list[int]]]:
    """The fields of a step's record that not every step has."""
    record = dict[str, float | list[list[int]]]()
    has_tokens = int(metrics["tokens"]) > 0
    if has_tokens and isfinite(metrics["loss"]):  # JSON has no infinity
        record["loss"] = metrics["loss"]
    if has_tokens and not skipped:
        record["norm"] = metrics.get("norm", 0.0)
    if skipped:
        record["skipped"] = True
    if "loss_scale" in metrics:
        record["loss_scale"] = metrics["loss_scale"]
    overflowed = int(metrics.get("overflowed", 0))
    if overflowed:
        record["overflowed"] = overflowed
    if "router_loss" in metrics:
        record["router_loss"] = metrics["router_loss"]
    if load:
        record["expert_load"] = load
    if dropped is not None:
        record["dropped"] = dropped
    return record


def _skip_words(skipped: bool, overflowed: int) -> str:
    """Words of a line about its step, and about steps since the last line that fp16 has dropped."""
    if not overflowed:
        return "  skipped" if skipped else ""
    words = "  skipped: its gradients overflow fp16" if skipped else ""
    others = overflowed - skipped
    if others:
        words += f"  {count_with_noun(others, 'step')} before it skipped: fp16 overflow"
    return words


def _spread(load: list[list[int]]) -> str:
    """The least and the most tokens that an expert of any layer has, relative to the mean of its
    layer; "" for no experts.
    """
    shares = list[float]()
    for row in load:
        total = sum(row)
        if total:
            shares.extend(count * len(row) / total for count in row)
    if not shares:
        return ""
    return f"  load {min(shares):.2f} to {max(shares):.2f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    if minutes:
        return f"{minutes}m {seconds:02}s"
    return f"{seconds}s"
