"""Profiles some steps of a run on this rank, with plan lines (SCALEC_PROFILE=FOLDER).

`rank00000.json` is a Chrome trace, for Perfetto (ui.perfetto.dev).  It has torch's ops, kernels and
memory, as torch's profiler sees them; a span for each line of the program, by the plan's line
(`Lines`); and the lines that nodes of backward and kernels belong to (`trace`).
`rank00000-lines.json` has its sums by plan line (`line_times`).  On CUDA the lines are NVTX ranges
too, and `rank00000-memory.pickle` is a snapshot of the allocator with its history, for
pytorch.org/memory_viz.

Without SCALEC_PROFILE this module is not imported; in a profiled step a line takes some 25 µs more
of host time.  Python's own tracing says which line a thread has come to; it is on while a step is
profiled, and only then.
"""

import json
import linecache
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch
from torch import nn
from torch import profiler as torch_profiler
from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile, record_function

from ..config.environment import Profiled
from .line_times import WAIT, line_times, longest
from .source_lines import plan_line
from .trace import add_lines

_PLAIN = str.maketrans({'"': "'", "\\": "/"})  # torch writes names into JSON as they are


class Lines:
    """While entered, each line of the program, the model's file, that this thread runs is a span;
    so are the model's modules.

    The span of a line is named by the plan's line, or else the program's, and the line's code; the
    span of a module by the module's name.  With `nvtx` they are NVTX ranges too.  `named` has the
    lines met so far: by the span's name, the name without the code.
    """

    def __init__(self, model: nn.Module, nvtx: bool) -> None:
        self.named: dict[str, str] = {}
        self.file = str(cast(Any, model).forward.__func__.__code__.co_filename)
        self._model, self._nvtx = model, nvtx
        self._names: dict[int, str] = {}
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace_call)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.settrace(self._before)

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Follows a function of the program, line by line."""
        if frame.f_code.co_filename != self.file:
            return None
        module_span, line_span = ExitStack(), ExitStack()  # of at most one span each
        if frame.f_code.co_name == "forward":
            name = self._modules.get(id(frame.f_locals.get("self")))
            if name:
                self._open(module_span, name)

        def follow(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if event in ("line", "return"):
                line_span.close()
            if event == "line":
                self._open(line_span, self._name(frame.f_lineno))
            if event == "return":  # after an exception too
                module_span.close()
            return follow

        return follow

    def _open(self, place: ExitStack, name: str) -> None:
        place.enter_context(record_function(name))
        if self._nvtx:
            cast(Any, torch.cuda).nvtx.range_push(name)
            place.callback(cast(Any, torch.cuda).nvtx.range_pop)

    @cached_property
    def _modules(self) -> Mapping[int, str]:
        modules = cast("dict[str, nn.Module]", dict(cast(Any, self._model).named_modules()))
        return {id(module): name or type(module).__name__ for name, module in modules.items()}

    def _name(self, number: int) -> str:
        name = self._names.get(number)
        if name is None:
            place = plan_line(self.file, number) or f"{Path(self.file).name}:{number}"
            code = linecache.getline(self.file, number).partition("  #")[0].strip()
            name = self._names[number] = f"{place}  {code}".translate(_PLAIN)
            self.named[name] = place
        return name


@contextmanager
def _spans_of_waits() -> Generator[None]:
    """While entered, each wait for a collective is a span; torch's profiler does not show waits."""
    kind: Any = Work
    wait = kind.wait

    def wait_in_span(work: Any, *timeout: Any) -> Any:
        with record_function(WAIT):
            return wait(work, *timeout)

    kind.wait = wait_in_span
    try:
        yield
    finally:
        kind.wait = wait


_P = ParamSpec("_P")
_T = TypeVar("_T")
# torch's span from one step to the next, with all that comes between
_TORCHS_STEP = "ProfilerStep#"


class Profiler:
    """While entered, profiles the calls that are asked for of a function that `of` wraps, counted
    from 1, and writes the profile.

    `first` steps were done before this run.
    """

    def __init__(
        self, request: Profiled, model: nn.Module, device: torch.device, first: int
    ) -> None:
        self._asked, self._first, self._done = request, first, 0
        self._times: dict[str, Any] = {}  # once they are written
        self._on_gpu = device.type == "cuda"
        self._lines = Lines(model, nvtx=self._on_gpu)
        self._file = request.folder / f"rank{int(os.environ.get('RANK', 0)):05}.json"
        before = request.first - 1
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            # the profiler sets itself up in its first moments, which fall into an earlier step
            schedule=cast(Any, torch_profiler).schedule(
                wait=max(before - 1, 0),
                warmup=min(before, 1),
                active=request.last - before,
                repeat=1,
            ),
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
        """`step`, with the calls that are asked for profiled."""

        def run(*args: _P.args, **options: _P.kwargs) -> _T:
            if self._done >= self._asked.last:
                return step(*args, **options)
            self._done += 1
            if self._done < self._asked.first:
                result = step(*args, **options)
            else:
                if self._on_gpu and self._done == self._asked.first:
                    cast(Any, torch.cuda.memory)._record_memory_history()
                with (
                    record_function(f"step {self._first + self._done}"),
                    self._lines,
                    _spans_of_waits(),
                ):
                    result = step(*args, **options)
            self._profile.step()
            return result

        return run

    def _write(self, finished: Any) -> None:
        if self._on_gpu:
            memory: Any = torch.cuda.memory
            memory._dump_snapshot(str(self._file.with_name(f"{self._file.stem}-memory.pickle")))
            memory._record_memory_history(enabled=None)
        finished.export_chrome_trace(str(self._file))
        trace = json.loads(self._file.read_text(encoding="utf-8"))
        trace["traceEvents"] = [
            event for event in trace["traceEvents"] if not event["name"].startswith(_TORCHS_STEP)
        ]
        add_lines(trace, self._lines.named)
        self._file.write_text(json.dumps(trace), encoding="utf-8")
        self._times = line_times(trace)
        self._file.with_name(f"{self._file.stem}-lines.json").write_text(
            json.dumps(self._times), encoding="utf-8"
        )

    def slow_lines(self) -> str:
        """The lines that take longest beyond the prediction.

        "" before all steps are profiled, or without a prediction.
        """
        if not self._times:
            return ""
        return longest(self._times, Path(self._lines.file).with_name("plan.json"))
