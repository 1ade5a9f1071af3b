"""The targets of emission: what differs in a program's forward between the runtime's functions
and torch alone.
"""

from collections.abc import Callable

from attrs import frozen

from ..ir import Kind, Op, Program, Type
from ..ops import OPS
from ..ops.attention import ATTENTION
from ..ops.call import Argument, Call, Group, Positions
from ..ops.protocol import DETERMINISTIC, RUNTIME, TORCH
from ..ops.ring_attention import RING_ATTENTION, ring_hops
from ..ops.saved_tensors import Local
from .imports import function_of


@frozen
class Target:
    """How a program says what an op does.

    function  the function that does an op
    call      what its call says besides the operands
    local     whether tensors are a rank's parts: then calls name groups of ranks and positions,
              coercions collectives, and lines around layers move flat parameters
    """

    function: Callable[[Op, Program], str]
    call: Callable[[Local], Call]
    local: bool = True


def own_call(local: Local) -> Call:
    """The call that the op's entry says."""
    return OPS[local.op.kind].call(local)


def torch_call(local: Local) -> Call:
    """The call of an op's entry without groups and positions, which DTensors know.

    Determinism is left out too, because torch has a switch for it.  Attention gets two facts that
    placements do not say: the order of positions, and how often keys go on around a ring.
    """
    entry_call = own_call(local)
    args = tuple(arg for arg in entry_call.args if not isinstance(arg, Group | Positions))
    options = dict[str, Argument]()
    for key, option in entry_call.options.items():
        if key != DETERMINISTIC.name and not isinstance(option, Group | Positions):
            options[key] = option
    is_attention = local.op.kind in (ATTENTION.name, RING_ATTENTION.name)
    if is_attention and (ranks := zigzag_ranks(local.program)) > 1:
        options["zigzag"] = ranks
    if local.op.kind == RING_ATTENTION.name and (count := ring_hops(local)):
        options["hops"] = count
    return Call(args, options)


def torch_function(op: Op, program: Program) -> str:
    """The function that does an op on DTensors."""
    if op.kind == "call":
        return function_of(op, program)
    entry = OPS[op.kind]
    if entry.torch:
        return entry.torch
    assert entry.function, f"emit: {op.kind} has no function"
    assert entry.module != RUNTIME, f"emit: nothing in torch does {op.kind}"
    return f"torch.{entry.function}" if entry.module == TORCH else entry.function


def placements(type: Type, program: Program) -> str:
    """The placements of a value's DTensor, an entry for each axis of the mesh: `[Shard(1),
    Replicate()]`.
    """
    return f"[{', '.join(_placement(type, axis) for axis in mesh_axes(program))}]"


def mesh_axes(program: Program) -> dict[str, int]:
    """The axes of DTensors, with their sizes.

    They are the axes of several ranks except a pipeline's, or else one axis of one rank.
    """
    stages = _stages_axis(program)
    axes = dict[str, int]()
    for axis in program.axes:
        if axis.size > 1 and axis.name != stages:
            axes[axis.name] = axis.size
    return axes or {"one": 1}


def whole_mesh(program: Program) -> dict[str, int]:
    """The axes of a program's DeviceMesh: the axes of DTensors, and a pipeline's."""
    tensor_axes = mesh_axes(program)
    names = (*tensor_axes, _stages_axis(program))
    axes = {axis.name: axis.size for axis in program.axes if axis.name in names}
    return axes | tensor_axes


def _stages_axis(program: Program) -> str:
    return program.pipeline.axis if program.pipeline else ""


def _placement(type: Type, axis: str) -> str:
    place = type.placement_on(axis)
    if place.dim:
        return f"Shard({type.dims.index(place.dim)})"
    words = {Kind.PARTIAL: "Partial()", Kind.MAXIMUM: 'Partial("max")'}
    return words.get(place.kind, "Replicate()")


def zigzag_ranks(program: Program) -> int:
    """The ranks that have two chunks of the sequence each; 1 where none has."""
    return program.degree(tuple(axis for _, axis in program.zigzags))


RUNTIME_TARGET = Target(function_of, own_call)
DTENSOR = Target(torch_function, torch_call, local=False)
