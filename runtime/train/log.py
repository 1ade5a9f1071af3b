"""The log of a run: lines on the terminal and JSON lines in the run folder, from rank 0.

Reading a metric waits for the device.  So a logged step's are copied beside, and read when the next
step has been handed to the device, which never runs dry; on the CPU, where they are there, at once.
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
from ..errors import counted
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
    def of(cls, step: int, metrics: Metrics, lr: float, counts: Mapping[str, Tensor]) -> "_Due":
        """Begins to copy; `counts` of steps go with the metrics."""

        # to memory that is pinned, as torch does it for a copy that does not block
        def copy(value: Tensor) -> Tensor:
            return value.to("cpu", non_blocking=True)

        scalars = {
            name: value for name, value in vars(metrics).items() if isinstance(value, Tensor)
        }
        values = {name: copy(value) for name, value in {**scalars, **counts}.items()}
        loads = tuple(map(copy, metrics.loads))
        if not metrics.loss.is_cuda:
            return cls(step, lr, values, loads, None)
        copied = torch.cuda.Event()
        copied.record()
        return cls(step, lr, values, loads, copied)

    def read(self) -> dict[str, float]:
        """The metrics of which there is one number, by name; waits for their step, and for no
        later one.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return {name: value.item() for name, value in self.values.items()}

    def expert_load(self) -> list[list[int]]:
        """After `read`: how many of the step's tokens each expert took, layer by layer."""
        return [
            row
            for load in self.loads
            for row in cast(Any, load.reshape(-1, load.shape[-1])).tolist()
        ]

    def dropped(self, tokens: int, choices: Sequence[int]) -> float | None:
        """After `read`: the part of `tokens` tokens' choices that no expert took; None where
        none can be dropped.
        """
        pairs = [*zip(self.loads, choices, strict=False)]
        made = sum(tokens * k * (load.numel() // load.shape[-1]) for load, k in pairs)
        return 1 - sum(int(load.sum()) for load, _ in pairs) / made if made else None


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
        """`choices`: of each load, how many experts a token chooses, where some may be dropped.

        The run's first `warm_up` steps, and those of the same line, are not compared with the
        prediction.
        """
        self._folder, self._first, self._steps = folder, first, steps
        self._file = LogFile(folder) if folder else None
        self._speed, self._choices, self._warm = speed, choices, first + warm_up
        self._progress, self._sinks = progress, sinks
        # of a run that is profiled, the lines that are slower than predicted
        self.slow_lines: Callable[[], str] = str
        self._began = time.monotonic()
        self._last: dict[str, float] = {}
        self._due: _Due | None = None
        self._empty: Tensor | int = 0  # steps so far in which no label counts
        self._overflowed: Tensor | int = 0  # steps since the last line that fp16 has dropped
        self._said_empty = False
        # the last step that was handed over, and that has been skipped
        self._handed, self._skipped = first, 0
        self.mark(first)

    def mark(self, step: int) -> None:
        """Throughput counts from here: what came before (validation, saving) is no training
        time.
        """
        self._marked, self._marked_step = time.monotonic(), step

    def step(self, step: int, metrics: Metrics, lr: float, due: bool = True) -> None:
        """One step, which may not have finished, and whether its line is due."""
        if self._folder is None:
            return
        self._empty = (metrics.tokens == 0) + self._empty
        if metrics.loss_scale is not None and metrics.norm is not None:
            overflows = metrics.loss.isfinite() & ~metrics.norm.isfinite()
            self._overflowed = overflows.long() + self._overflowed
        self._handed = step
        if due:
            counts = {"empty": self._empty, "overflowed": self._overflowed}
            tensors = {name: count for name, count in counts.items() if isinstance(count, Tensor)}
            self._due = _Due.of(step, metrics, lr, tensors)
            self._overflowed = 0
        elif self._progress is not None:
            seconds = (time.monotonic() - self._marked) / (step - self._marked_step)
            self._progress.show(step, self._steps, self._left(step), self._speed.words(seconds))
        if not (due and metrics.loss.is_cuda):
            self.settle()

    def settle(self) -> None:
        """Writes the step that is due, if one is, and one that has been skipped and is not due."""
        if self._due is not None:
            due, self._due = self._due, None
            metrics = due.read()
            self._finished(
                due.step,
                metrics,
                due.lr,
                due.expert_load(),
                due.dropped(self._speed.tokens, self._choices),
            )
        if 0 < self._skipped <= self._handed:
            self._write({"step": self._skipped, "skipped": True})
            self._skipped = 0

    def _finished(
        self,
        step: int,
        metrics: dict[str, float],
        lr: float,
        load: list[list[int]],
        dropped: float | None,
    ) -> None:
        loss, tokens, scale = metrics["loss"], int(metrics["tokens"]), metrics.get("loss_scale")
        norm = metrics.get("norm", 0.0)
        skipped = step == self._skipped or (
            bool(tokens) and not (isfinite(loss) and isfinite(norm))
        )
        self._skipped = 0 if step == self._skipped else self._skipped
        seconds, warm = (
            (time.monotonic() - self._marked) / (step - self._marked_step),
            self._marked_step >= self._warm,
        )
        self.mark(step)
        if (empty := int(metrics["empty"])) and not self._said_empty:
            self._said_empty = True
            steps = f"{empty} of {step - self._first} steps so far"
            self._say(
                f"note: in {steps} no label counts: they update nothing, and the learning rate"
                " goes on"
            )
        reached = f"loss {loss:.4f}  norm {norm:.3f}" if tokens else "no label counts"
        scaled = "" if scale is None else f"  scale {scale:g}"
        overflowed = int(metrics.get("overflowed", 0))
        self._say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  {reached}  lr {lr:.2e}"
            f"{scaled}{_skip_words(skipped, overflowed)}"
            f"{_spread(load)}{'' if dropped is None else f'  dropped {dropped:.1%}'}"
            f"  {self._speed.words(seconds)}  {self._left(step)} left"
        )
        known = {"loss": loss} if tokens and isfinite(loss) else {}  # JSON has no infinity
        known |= {"norm": norm} if tokens and not skipped else {}
        known |= {"skipped": True} if skipped else {}
        known |= {} if scale is None else {"loss_scale": scale}
        known |= {"overflowed": overflowed} if overflowed else {}
        known |= {"router_loss": metrics["router_loss"]} if "router_loss" in metrics else {}
        known |= {"expert_load": load} if load else {}
        known |= {} if dropped is None else {"dropped": dropped}
        self._write(
            {"step": step, **known, "lr": lr, "tokens": tokens, **self._speed.values(seconds)}
        )
        if warm and (complaint := self._speed.complaint(seconds)):
            where = self.slow_lines()
            self._say(
                f"{complaint};"
                f" {f'most at {where}' if where else 'SCALEC_PROFILE=FOLDER tells where'}"
            )

    def looked(self, step: int) -> None:
        """A step of which more than metrics is looked at: its line is not compared with the
        prediction.
        """
        self._warm = max(self._warm, step)

    def skipped(self, step: int, words: str) -> None:
        """A step that has updated nothing: it has one record, that of its line if one is due."""
        if self._folder is not None:
            self._say(f"{words}: skipped")
            self._skipped = step

    def validation(self, step: int, metrics: Metrics) -> None:
        """The loss on held-out data after `step` steps."""
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

    def memory(self, step: int, account: tuple[int, int], of: Account, found: Peak | None) -> None:
        """The memory that a step took of a GPU, beside the least and the most that the compiler
        counts.
        """
        if self._folder is None:
            return
        self._say(line(account, of, found))
        measured = {} if found is None else vars(found)
        least, most = account
        worst = {"account_at_worst": most} if most > least else {}
        self._write({"step": step, "account": least, **worst, "reserve": of.reserve, **measured})

    def close(self) -> None:
        """Makes room on the terminal for what else is said."""
        if self._progress is not None:
            self._progress.clear()

    def say(self, line: str) -> None:
        """A line on the terminal."""
        if self._folder is not None:
            self._say(line)

    def summary(self, saved: Path, further: str, help_: str) -> None:
        """The last lines of a run: its result, where it lies, and what to try next."""
        results = ", ".join(
            f"{name} {self._last[name]:.4f}"
            for name in ("loss", "validation")
            if name in self._last
        )
        self.say(
            f"\nfinished {counted(self._steps, 'step')} in"
            f" {_duration(time.monotonic() - self._began)}: {results}"
        )
        self.say(f"  log         {self._folder}/{NAME}\n  checkpoint  {saved}")
        self.say(f"  train on    {further}\n  all options {help_}")

    def _left(self, step: int) -> str:
        spent = time.monotonic() - self._began
        return _duration(spent / (step - self._first) * (self._steps - step))

    def _say(self, line: str) -> None:
        try:
            self.close()
            print(line, flush=True)
        except (
            BrokenPipeError
        ):  # a run goes on though nobody reads its lines: they are in log.jsonl
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write(self, record: Mapping[str, float | list[list[int]]]) -> None:
        assert self._file is not None, "log: only rank 0 writes"
        self._last |= {
            key: value for key, value in record.items() if isinstance(value, int | float)
        }
        for place in (self._file, self._sinks):
            if place is not None and (trouble := place.write(record)):
                self._say(trouble)


def _skip_words(skipped: bool, overflowed: int) -> str:
    """Words of a line about its step, and about steps since the last line that fp16 has dropped."""
    if not overflowed:
        return "  skipped" if skipped else ""
    own = "  skipped: its gradients overflow fp16" if skipped else ""
    others = overflowed - skipped
    return f"{own}  {counted(others, 'step')} before it skipped: fp16 overflow" if others else own


def _spread(load: list[list[int]]) -> str:
    """The least and the most tokens that an expert of any layer has, by its layer's mean; ""
    for no experts.
    """
    shares = [count * len(row) / sum(row) for row in load if any(row) for count in row]
    return f"  load {min(shares):.2f} to {max(shares):.2f}" if shares else ""


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}h {minutes:02}m"
        if hours
        else f"{minutes}m {seconds:02}s"
        if minutes
        else f"{seconds}s"
    )
