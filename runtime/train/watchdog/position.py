"""Where this rank is: its program's line, by the frames of its threads, and its call, by the plan's
order.

Groups count their calls themselves, so this module counts nothing while a step runs.  A group
counts calls that have begun; where the host runs ahead of a GPU, torch's Flight Recorder knows
which of them are not done.
"""

import json
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import c10d
from ...comm.mesh import Axis, Mesh
from ...errors import count_with_noun
from .call_order import Call, get_planned_calls
from .verdict import MESSAGES, Position, members

_RUNTIME = __name__.rsplit(".", 3)[0] + "."
_WAITING = tuple(_RUNTIME + name for name in ("comm.", "checkpoint.agreement"))
"""Modules whose calls wait for other ranks."""
_HELPERS = {"checkpoint.background": "saver", "data.prefetch": "batches"}
"""By module where the main thread waits, the beginning of the name of the thread that it waits
for.
"""
_COMPARES = _RUNTIME + "debug.compare"
_TORCH, _PYTHON = str(Path(torch.__file__).parent), str(Path(threading.__file__).parent)

Counts = Mapping[str, int]
Frames = Sequence[tuple[FrameType, int]]
"""Frames, innermost first, each with its line."""


def counts(mesh: Mesh) -> dict[Any, int]:
    """By group, the calls of the plan that this rank has made in it so far."""
    # the group of an axis may become the one of all ranks
    groups: set[Any] = {*mesh.groups().values(), dist.group.WORLD}
    asides = mesh.asides()
    return {group: c10d.calls_made(group, mesh.device) - asides[group] for group in groups}


def position(
    mesh: Mesh,
    host: str,
    rank: int,
    doing: str,
    evaluates: bool,
    before: Mapping[Any, int],
    lost_frames: Frames | None,
) -> Position:
    """This rank's position.

    `before` has the groups' counts at the beginning of `doing`, `lost_frames` the frames of the
    call that failed.
    """
    frames, groups, calls_of_plan = lost_frames or _frames(), mesh.groups(), counts(mesh)
    now = {name: calls_of_plan[group] + mesh.asides()[group] for name, group in groups.items()}
    waits, waiting = _find_wait(mesh, frames)
    calls_in_order = order(mesh, evaluates)
    first_pending = _find_pending_calls(groups)
    pending = {name: first_pending[name] - before.get(groups[name], 0) for name in first_pending}
    calls, astray = _find_calls(calls_in_order(), _calls_made(mesh, calls_of_plan, before), pending)
    waiting = waiting or bool(pending)
    if astray:
        return Position(
            rank, host, doing, now, waits, (), waiting, "", _describe_code(frames), astray
        )
    if waiting and _module(_skip_libraries(frames)[0][0]) == f"{_RUNTIME}comm.store":
        return Position(
            rank, host, doing, now, "", (), True, "a meeting of all ranks", _describe_code(frames)
        )
    peers: Sequence[int] = ()
    call = _message_call(calls_in_order, frames) or _current_call(calls, waits, pending)
    if call is not None and call.peer is not None:
        peers = [members(mesh.axes, call.group, rank)[call.peer]]
    compares = any(_module(frame) == _COMPARES for frame, _ in frames)
    if call is not None and waits and not (pending or compares):
        astray = _find_difference(call, frames)
    words = ""
    if call is not None and waiting and not astray:
        words = f"a comparison of copies after {call}" if compares else f"{call}"
    return Position(
        rank, host, doing, now, waits, peers, waiting, words, _describe_code(frames), astray
    )


def _calls_made(mesh: Mesh, calls_of_plan: Mapping[Any, int], before: Mapping[Any, int]) -> Counts:
    """By name of group, the calls that this rank has made since the counts were `before`."""
    calls_made = dict[str, int]()
    for name, group in mesh.groups().items():
        if mesh.device.type == "cpu" or not name.endswith(MESSAGES):  # NCCL counts no messages
            calls_made[name] = calls_of_plan[group] - before.get(group, 0)
    return calls_made


def _current_call(calls: Mapping[str, Call], waits: str, pending: Counts) -> Call | None:
    """The call in the group that the rank waits in; where that is unknown, the first pending call,
    or else the last that was made.
    """
    if waits in calls or not calls:
        return calls.get(waits)
    in_order = [*calls.values()]
    return in_order[0] if pending else in_order[-1]


def _message_call(calls_in_order: Callable[[], Iterator[Call]], frames: Frames) -> Call | None:
    """The call of the message that a stage waits for; None if this rank waits for none."""
    is_message = _message(frames)
    if is_message is None:
        return None
    return next((call for call in calls_in_order() if is_message(call)), None)


def _find_difference(call: Call, frames: Frames) -> str:
    """How the rank's call differs from the plan's call; "" where it may be the same."""
    names = _caller(frames)
    x, axis = names.get("x"), _axis(names)
    if call.elements is None or call.peer is not None or not isinstance(x, Tensor) or axis is None:
        return ""
    # the plan counts the elements of the whole, or of this rank's part
    if call.elements in (x.numel(), x.numel() // axis.size):
        return ""
    return f"its call has {x.numel():,} elements, and the plan's {call} has {call.elements:,}"


# ---- the plan's order


def order(mesh: Mesh, evaluates: bool) -> Callable[[], Iterator[Call]]:
    """A function that gives this rank's calls in a step, or in evaluation after evaluation.

    There are none where plan.json is not there.
    """
    try:
        plan = _plan_of_mesh(mesh)
    except (OSError, ValueError, KeyError, StopIteration):
        # plan.json is not there, or of another plan
        return lambda: iter(())
    place = mesh.rank(plan["pipeline"]["axis"]) if "pipeline" in plan else None
    if not evaluates:
        return lambda: get_planned_calls(plan, False, place)
    return lambda: chain.from_iterable(get_planned_calls(plan, True, place) for _ in repeat(None))


def _plan_of_mesh(mesh: Mesh) -> dict[str, Any]:
    """The content of plan.json beside the program, for this mesh: the largest or a smaller one.

    OSError, ValueError, KeyError or StopIteration where there is none.
    """
    largest: dict[str, Any] = json.loads(Path(sys.argv[0]).with_name("plan.json").read_bytes())
    differences: list[dict[str, Any]] = [{}, *largest.get("smaller", [])]
    plans = (largest | difference for difference in differences)
    return next(plan for plan in plans if plan["mesh"] == mesh.axes)


def _find_calls(
    order: Iterator[Call], calls_made: Counts, pending: Counts
) -> tuple[dict[str, Call], str]:
    """By group, the call that this rank is in, in the plan's order; and how the counts differ from
    the plan's, or "".

    A group's call is its first `pending` one, or else the last that was made.
    """
    passed, calls = Counter[str](), dict[str, Call]()
    following: Call | None = None
    for call in order:
        if call.group not in calls_made:
            continue
        if passed[call.group] == calls_made[call.group]:
            following = call
            break
        passed[call.group] += 1
        last = 0 if pending else calls_made[call.group]
        if passed[call.group] <= pending.get(call.group, last):
            calls.pop(call.group, None)  # so that the group comes last
            calls[call.group] = call
    more = [name for name, number in calls_made.items() if number > passed[name]]
    if not more or (not passed and following is None):
        return calls, ""
    differences = list[str]()
    for name in more:
        number = count_with_noun(calls_made[name], "call")
        differences.append(f"{number} over {name} where the plan has {passed[name]}")
    astray = f"it has made {' and '.join(differences)}"
    if following:
        astray += f" before {following}"
    return calls, astray


def _find_pending_calls(groups: Mapping[str, Any]) -> dict[str, int]:
    """The number of each group's first call that has begun and is not done.

    Empty where torch keeps no record of calls.
    """
    names = {group.group_name: name for name, group in groups.items()}
    first_calls: dict[str, int] = {}
    for call in c10d.calls_under_way():
        if call["is_p2p"]:
            continue
        if name := names.get(call["process_group"][0]):
            number = call["collective_seq_id"]
            first_calls[name] = min(first_calls.get(name, number), number)
    return first_calls


# ---- frames


def _frames() -> Frames:
    """The frames of the thread that is at work: on CUDA backward runs on its own thread, and so do
    saves and batches.
    """
    stacks = dict[int, list[tuple[FrameType, int]]]()
    for ident, frame in cast(Any, sys)._current_frames().items():
        stacks[ident] = [*walk_stack(frame)]
    main = stacks.pop(threading.main_thread().ident or 0, [])
    if own_frames := _skip_libraries(main):
        helper = _HELPERS.get(_module(own_frames[0][0]).removeprefix(_RUNTIME))
        for thread in threading.enumerate():
            if helper and thread.name.startswith(helper):
                return stacks.get(thread.ident or 0, main)
    # torch.autograd.graph, which runs backward
    if not main or Path(main[0][0].f_code.co_filename).name != "graph.py":
        return main
    # Python did not start the threads of autograd, and does not list them
    listed = {thread.ident for thread in threading.enumerate()}
    return next((stack for ident, stack in stacks.items() if ident not in listed), main)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _skip_libraries(frames: Frames) -> Frames:
    """The frames without torch's and without Python's library."""
    return [(frame, line) for frame, line in frames if not _is_library(frame.f_code.co_filename)]


def _is_library(file: str) -> bool:
    return file.startswith(_TORCH) or (file.startswith(_PYTHON) and "site-packages" not in file)


def _find_wait(mesh: Mesh, frames: Frames) -> tuple[str, bool]:
    """The group that the innermost call waits in, or "", and whether it waits for others at all."""
    own_frames = _skip_libraries(frames)
    if not own_frames:
        return "", False
    inner, number = own_frames[0]
    line, module = linecache.getline(inner.f_code.co_filename, number), _module(inner)
    waiting = module.startswith(_WAITING)
    if module.startswith(_RUNTIME):
        waiting = waiting or any(word in line for word in ("wait(", "synchronize(", "barrier("))
    axis = _axis(_caller(frames))
    if axis is not None:
        for name, group in mesh.groups().items():
            if group is axis.group:
                return name, waiting
    return "", waiting


def _caller(frames: Frames) -> Mapping[str, Any]:
    """The variables of the innermost call of the runtime that knows its axis; none without one."""
    for frame, _ in _skip_libraries(frames):
        if not _module(frame).startswith(_RUNTIME):
            break
        variables = frame.f_locals
        if _axis(variables) is not None:
            return variables
    return dict[str, Any]()


def _axis(names: Mapping[str, Any]) -> Axis | None:
    """The axis of a call of the runtime: one of its variables, or an attribute of `self`."""
    holder = names.get("self")
    candidates = (
        names.get("axis"),
        getattr(holder, "axis", None),
        getattr(getattr(holder, "expert_rows", None), "axis", None),
    )
    return next((axis for axis in candidates if isinstance(axis, Axis)), None)


def _message(frames: Frames) -> Callable[[Call], bool] | None:
    """A test for the plan's call of the message that a stage waits for; None if this rank waits
    for none.
    """
    if not any(_module(frame).startswith(f"{_RUNTIME}comm.p2p") for frame, _ in frames[:3]):
        return None
    for frame, _ in frames:
        cell: Any = frame.f_locals.get("self")
        if _module(frame) == f"{_RUNTIME}pipeline.stage_step" and hasattr(cell, "_microbatch"):
            where = "forward" if frame.f_code.co_name == "forward" else "backward"
            key = "receive", where, cell._stage, cell._microbatch
            return lambda call: (call.op, call.where, call.stage, call.microbatch) == key
    return None


def _describe_code(frames: Frames) -> str:
    """The line of the program and of the plan, and the function that is called there."""
    from ...debug.source_lines import place  # most runs do without

    own_frames, program = _skip_libraries(frames), Path(sys.argv[0]).name
    words, is_innermost = list[str](), False
    for position, (frame, line) in enumerate(own_frames):
        if Path(frame.f_code.co_filename).name == program:
            words.append(place(frame.f_code.co_filename, line))
            is_innermost = position == 0
            break
    if own_frames and not is_innermost:
        inner, number = own_frames[0]
        code = inner.f_code
        words.insert(0, f"{code.co_name} ({Path(code.co_filename).name}:{number})")
    return ", ".join(words)
