"""Profiles some steps of a run on this rank, with plan lines (SCALEC_PROFILE=FOLDER).

`rank00000.json` is a Chrome trace, for Perfetto (ui.perfetto.dev): torch's ops, kernels and memory, as its profiler
sees them; a span for each line of the program, by the plan's line (`lines`); what backward and kernels do for which
line (`timeline`).  On CUDA the lines are NVTX ranges too, and `rank00000-memory.pickle` is a snapshot of the allocator
with its history, for pytorch.org/memory_viz.

Without SCALEC_PROFILE this module is not imported; in a profiled step a line takes some 25 µs more of host time.

Non-goals: no summaries; a stage of a pipeline, or any rank, has its own file.
"""

import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch
from torch import nn
from torch import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from ..config.environment import Profiled
from .spans import Lines
from .trace import add_lines

_P = ParamSpec("_P")
_T = TypeVar("_T")
_TORCHS_STEP = "ProfilerStep#"  # from step to step, whatever comes between and after


class Profiler:
    """While entered, profiles those calls of what `of` wraps that are asked for, counted from 1, and writes them.

    `first` steps were done before this run.
    """

    def __init__(self, asked: Profiled, model: nn.Module, device: torch.device, first: int) -> None:
        self._asked, self._first, self._done = asked, first, 0
        self._on_gpu = device.type == "cuda"
        self._lines = Lines(model, nvtx=self._on_gpu)
        self._file = asked.folder / f"rank{int(os.environ.get('RANK', 0)):05}.json"
        before = asked.first - 1
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=cast(Any, torch_profiler).schedule(
                wait=max(before - 1, 0), warmup=min(before, 1), active=asked.last - before, repeat=1
            ),  # the profiler's first moments, in which it sets itself up, are those of an earlier step
            on_trace_ready=self._write,
            profile_memory=True,
        )

    def __enter__(self) -> Self:
        self._asked.folder.mkdir(parents=True, exist_ok=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *reason: type[BaseException] | BaseException | TracebackType | None) -> None:
        cast(Any, self._profile).__exit__(*reason)

    def of(self, step: Callable[_P, _T]) -> Callable[_P, _T]:
        """`step`, some of whose calls are profiled."""

        def profiled(*args: _P.args, **options: _P.kwargs) -> _T:
            if self._done >= self._asked.last:
                return step(*args, **options)
            self._done += 1
            if self._done < self._asked.first:
                result = step(*args, **options)
            else:
                self._remember_memory()
                with record_function(f"step {self._first + self._done}"), self._lines:
                    result = step(*args, **options)
            self._profile.step()
            return result

        return profiled

    def _remember_memory(self) -> None:
        if self._on_gpu and self._done == self._asked.first:
            cast(Any, torch.cuda.memory)._record_memory_history()

    def _write(self, finished: Any) -> None:
        if self._on_gpu:
            memory: Any = torch.cuda.memory
            memory._dump_snapshot(str(self._file.with_name(f"{self._file.stem}-memory.pickle")))
            memory._record_memory_history(enabled=None)
        finished.export_chrome_trace(str(self._file))
        trace = json.loads(self._file.read_text(encoding="utf-8"))
        trace["traceEvents"] = [it for it in trace["traceEvents"] if not it["name"].startswith(_TORCHS_STEP)]
        add_lines(trace, self._lines.named)
        self._file.write_text(json.dumps(trace), encoding="utf-8")
