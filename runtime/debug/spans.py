"""Profiler spans for the lines of a program, without changing the program.

Python's own tracing tells which line a thread has come to; it is on while a step is profiled, and only then.

Non-goals: what runs in other threads, as backward does on CUDA (`timeline` finds the lines it belongs to).
"""

import linecache
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import record_function

from .source_lines import plan_line

_PLAIN = str.maketrans({'"': "'", "\\": "/"})  # torch writes names into JSON as they are


class Lines:
    """While entered, each line that this thread runs of the program, the model's file, is a span; so are its modules.

    A line is called by the plan's line, or else the program's, and its code; a module by its name.  With `nvtx` they
    are NVTX ranges too.  `named` has the lines met so far: by their names, what they are called without their code.
    """

    def __init__(self, model: nn.Module, nvtx: bool) -> None:
        self.named: dict[str, str] = {}
        self._file = str(cast(Any, model).forward.__func__.__code__.co_filename)
        self._model, self._nvtx = model, nvtx
        self._names: dict[int, str] = {}
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Follows a function of the program, line by line."""
        if frame.f_code.co_filename != self._file:
            return None
        whole, line = _Span(self._nvtx), _Span(self._nvtx)
        if frame.f_code.co_name == "forward" and (name := self._modules.get(id(frame.f_locals.get("self")))):
            whole.open(name)

        def follow(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if event in ("line", "return"):
                line.close()
            if event == "line":
                line.open(self._name(frame.f_lineno))
            if event == "return":  # after an exception too
                whole.close()
            return follow

        return follow

    @cached_property
    def _modules(self) -> Mapping[int, str]:
        named = cast("dict[str, nn.Module]", dict(cast(Any, self._model).named_modules()))
        return {id(module): name or type(module).__name__ for name, module in named.items()}

    def _name(self, number: int) -> str:
        if (name := self._names.get(number)) is None:
            place = plan_line(self._file, number) or f"{Path(self._file).name}:{number}"
            code = linecache.getline(self._file, number).partition("  #")[0].strip()
            name = self._names[number] = f"{place}  {code}".translate(_PLAIN)
            self.named[name] = place
        return name


class _Span:
    """What is open at one place, if anything."""

    def __init__(self, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._open: record_function | None = None

    def open(self, name: str) -> None:
        self._open = record_function(name)
        self._open.__enter__()
        if self._nvtx:
            cast(Any, torch.cuda).nvtx.range_push(name)

    def close(self) -> None:
        if self._open is None:
            return
        if self._nvtx:
            cast(Any, torch.cuda).nvtx.range_pop()
        self._open.__exit__(None, None, None)
        self._open = None
