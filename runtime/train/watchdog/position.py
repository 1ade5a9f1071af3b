"""Where this rank is: its program's line from the frames of its threads, its call from the plan's
order.

Groups count their calls themselves, so that nothing is counted here while a step runs.  A group's
count is of calls that have begun; where the host runs ahead of a GPU, torch's Flight Recorder knows
which of them are not done.
"""

import json
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat, takewhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import c10d
from ...comm.mesh import Axis, Mesh
from ...errors import counted
from .call_order import Call, planned
from .verdict import MESSAGES, Position, members

_RUNTIME = __name__.rsplit(".", 3)[0] + "."
_WAITING = tuple(_RUNTIME + name for name in ("comm.", "checkpoint.agreement"))
"""Modules whose calls wait for other ranks."""
_HELPERS = {"checkpoint.background": "saver", "data.prefetch": "batches"}
"""Threads, by the beginning of their names, for which the main thread waits in a module."""
_COMPARES = _RUNTIME + "debug.compare"
_TORCH, _PYTHON = str(Path(torch.__file__).parent), str(Path(threading.__file__).parent)

Counts = Mapping[str, int]
Frames = Sequence[tuple[FrameType, int]]
"""Frames, innermost first, each with its line."""


def counts(mesh: Mesh) -> dict[Any, int]:
    """The calls of the plan that this rank has made so far in each of its groups, by the group."""
    # some axis may become that of all ranks
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
    lost: Frames | None,
) -> Position:
    """This rank's; `before` are the counts at the beginning of what it does, `lost` the frames
    in which it failed.
    """
    frames, groups, all_ = lost or _frames(), mesh.groups(), counts(mesh)
    now = {name: all_[group] + mesh.asides()[group] for name, group in groups.items()}
    counted_here = (
        name for name in groups if mesh.device.type == "cpu" or not name.endswith(MESSAGES)
    )
    # NCCL counts no messages
    made = {name: all_[groups[name]] - before.get(groups[name], 0) for name in counted_here}
    waits, waiting = _waits(mesh, frames)
    calls_of = order(mesh, evaluates)
    pending = {
        name: first - before.get(groups[name], 0) for name, first in _pending(groups).items()
    }
    calls, astray = _calls(calls_of(), made, pending)
    waiting = waiting or bool(pending)
    if astray:
        return Position(rank, host, doing, now, waits, (), waiting, "", _code(frames), astray)
    if waiting and _module(_own(frames)[0][0]) == f"{_RUNTIME}comm.store":
        return Position(
            rank, host, doing, now, "", (), True, "a meeting of all ranks", _code(frames)
        )
    peers: Sequence[int] = ()
    call = calls.get(waits) or next(
        iter(calls.values()) if pending else reversed(calls.values()), None
    )
    if message := _message(frames):
        call = next((each for each in calls_of() if message(each)), call)
    if call is not None and call.peer is not None:
        peers = [members(mesh.axes, call.group, rank)[call.peer]]
    beside = "a comparison of copies after " * any(_module(each) == _COMPARES for each, _ in frames)
    astray = _other(call, frames) if call is not None and waits and not (pending or beside) else ""
    words = f"{beside}{call}" if call is not None and waiting and not astray else ""
    return Position(rank, host, doing, now, waits, peers, waiting, words, _code(frames), astray)


def _other(call: Call, frames: Frames) -> str:
    """How a rank is in another call than the one that the plan has as this; "" where it may be
    that.
    """
    names = _caller(frames)
    x, axis = names.get("x"), _axis(names)
    if call.elements is None or call.peer is not None or not isinstance(x, Tensor) or axis is None:
        return ""
    if call.elements in (x.numel(), x.numel() // axis.size):  # of all, or of this rank's part
        return ""
    return f"its call has {x.numel():,} elements, and the plan's {call} has {call.elements:,}"


# ---- the plan's order


def order(mesh: Mesh, evaluates: bool) -> Callable[[], Iterator[Call]]:
    """The calls of this rank in a step, or in evaluation after evaluation; none where plan.json
    is not there.
    """
    try:
        largest: dict[str, Any] = json.loads(Path(sys.argv[0]).with_name("plan.json").read_bytes())
        sizes: list[dict[str, Any]] = [{}, *largest.get("smaller", [])]
        plan = next(
            plan for plan in (largest | smaller for smaller in sizes) if plan["mesh"] == mesh.axes
        )
    except (
        OSError,
        ValueError,
        KeyError,
        StopIteration,
    ):  # plan.json is not there, or of another plan
        return lambda: iter(())
    place = mesh.rank(plan["pipeline"]["axis"]) if "pipeline" in plan else None
    if not evaluates:
        return lambda: planned(plan, False, place)
    return lambda: chain.from_iterable(planned(plan, True, place) for _ in repeat(None))


def _calls(order: Iterator[Call], made: Counts, pending: Counts) -> tuple[dict[str, Call], str]:
    """The call in which each group is, in the plan's order; how the counts are not those of the
    plan.

    That is the first `pending` one, or else the last that was made.
    """
    done, calls = Counter[str](), dict[str, Call]()
    following: Call | None = None
    for call in order:
        if call.group not in made:
            continue
        if done[call.group] == made[call.group]:
            following = call
            break
        done[call.group] += 1
        if done[call.group] <= pending.get(call.group, 0 if pending else made[call.group]):
            calls.pop(call.group, None)
            calls[call.group] = call
    more = [name for name, number in made.items() if number > done[name]]
    if not more or (not done and following is None):
        return calls, ""
    what = " and ".join(
        f"{counted(made[name], 'call')} over {name} where the plan has {done[name]}"
        for name in more
    )
    return calls, f"it has made {what}" + (f" before {following}" if following else "")


def _pending(groups: Mapping[str, Any]) -> dict[str, int]:
    """The first call of each group that has begun and is not done, where torch keeps a record
    of calls.
    """
    under_way = [each for each in c10d.calls_under_way() if not each["is_p2p"]]
    names = {group.group_name: name for name, group in groups.items()}
    found: dict[str, int] = {}
    for each in under_way:
        if name := names.get(each["process_group"][0]):
            found[name] = min(found.get(name, each["collective_seq_id"]), each["collective_seq_id"])
    return found


# ---- frames


def _frames() -> Frames:
    """The frames of the thread that is at work: on CUDA backward has one of its own, as saves
    and batches have.
    """
    stacks = {
        ident: [*walk_stack(frame)] for ident, frame in cast(Any, sys)._current_frames().items()
    }
    main = stacks.pop(threading.main_thread().ident or 0, [])
    if own := _own(main):
        helper = _HELPERS.get(_module(own[0][0]).removeprefix(_RUNTIME))
        for thread in threading.enumerate():
            if helper and thread.name.startswith(helper):
                return stacks.get(thread.ident or 0, main)
    # torch.autograd.graph, which runs backward
    if not main or Path(main[0][0].f_code.co_filename).name != "graph.py":
        return main
    # threads of autograd are none of these
    python = {thread.ident for thread in threading.enumerate()}
    return next((own for ident, own in stacks.items() if ident not in python), main)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _own(frames: Frames) -> Frames:
    """Without those of torch and of Python's library."""
    return [each for each in frames if not _is_library(each[0].f_code.co_filename)]


def _is_library(file: str) -> bool:
    return file.startswith(_TORCH) or (file.startswith(_PYTHON) and "site-packages" not in file)


def _waits(mesh: Mesh, frames: Frames) -> tuple[str, bool]:
    """The group in which the innermost call waits, if one is known, and whether it waits for
    others at all.
    """
    if not (own := _own(frames)):
        return "", False
    inner, number = own[0]
    line, module = linecache.getline(inner.f_code.co_filename, number), _module(inner)
    waiting = module.startswith(_WAITING) or (
        module.startswith(_RUNTIME)
        and any(word in line for word in ("wait(", "synchronize(", "barrier("))
    )
    axis = _axis(_caller(frames))
    named = (
        name for name, group in mesh.groups().items() if axis is not None and group is axis.group
    )
    return next(named, ""), waiting


def _caller(frames: Frames) -> Mapping[str, Any]:
    """The variables of the innermost call of the runtime that knows its axis."""
    inner = takewhile(lambda each: _module(each[0]).startswith(_RUNTIME), _own(frames))
    return next(
        (each.f_locals for each, _ in inner if _axis(each.f_locals) is not None), dict[str, Any]()
    )


def _axis(names: Mapping[str, Any]) -> Axis | None:
    """The axis of a call of the runtime, which it has as a variable or as an attribute."""
    holder = names.get("self")
    found = (
        names.get("axis"),
        getattr(holder, "axis", None),
        getattr(getattr(holder, "held", None), "axis", None),
    )
    return next((each for each in found if isinstance(each, Axis)), None)


def _message(frames: Frames) -> Callable[[Call], bool] | None:
    """A test for the plan's call of the message that a stage waits for; None if this rank waits
    for none.
    """
    if not any(_module(each).startswith(f"{_RUNTIME}comm.p2p") for each, _ in frames[:3]):
        return None
    for each, _ in frames:
        cell: Any = each.f_locals.get("self")
        if _module(each) == f"{_RUNTIME}pipeline.stage_step" and hasattr(cell, "_microbatch"):
            key = ("receive", "forward" if each.f_code.co_name == "forward" else "backward")
            stage, microbatch = cell._stage, cell._microbatch
            return lambda call: (
                (call.op, call.where, call.stage, call.microbatch) == (*key, stage, microbatch)
            )
    return None


def _code(frames: Frames) -> str:
    """The line of the program and of the plan, and the function in which it is."""
    from ...debug.source_lines import place  # most runs do without

    own, name = _own(frames), Path(sys.argv[0]).name
    program = next((each for each in own if Path(each[0].f_code.co_filename).name == name), None)
    words = [place(program[0].f_code.co_filename, program[1])] if program else []
    if own and own[0] is not program:
        code, number = own[0][0].f_code, own[0][1]
        words.insert(0, f"{code.co_name} ({Path(code.co_filename).name}:{number})")
    return ", ".join(words)
