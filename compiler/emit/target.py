"""The targets of emission: what differs in a program's forward between the runtime's functions
and torch alone.
"""

from collections.abc import Callable

from attrs import frozen

from ..ir import Kind, Op, Program, Type
from ..ops import OPS
from ..ops.attention import ATTENTION
from ..ops.call import Call, Group, Positions
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


def own_call(it: Local) -> Call:
    """The call that the op's entry says."""
    return OPS[it.op.kind].call(it)


def torch_call(it: Local) -> Call:
    """The same without ranks and their parts, which DTensors know, and determinism, for which torch
    has a switch.

    Attention is told what placements do not say: the order of positions, and how often keys go on
    around a ring.
    """
    said = own_call(it)
    args = tuple(each for each in said.args if not isinstance(each, Group | Positions))
    named = {key: each for key, each in said.options.items() if key != DETERMINISTIC.name}
    options = {key: each for key, each in named.items() if not isinstance(each, Group | Positions)}
    if (
        it.op.kind in (ATTENTION.name, RING_ATTENTION.name)
        and (ranks := zigzag_ranks(it.program)) > 1
    ):
        options["zigzag"] = ranks
    if it.op.kind == RING_ATTENTION.name and (count := ring_hops(it)):
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
    """The axes of DTensors, with their sizes: those of several ranks but a pipeline's, or one
    of one rank.
    """
    stages = program.pipeline.axis if program.pipeline else ""
    return {
        axis.name: axis.size for axis in program.axes if axis.size > 1 and axis.name != stages
    } or {"one": 1}


def whole_mesh(program: Program) -> dict[str, int]:
    """The axes of a program's DeviceMesh: those of DTensors, and a pipeline's."""
    own = mesh_axes(program)
    stages = program.pipeline.axis if program.pipeline else ""
    return {axis.name: axis.size for axis in program.axes if axis.name in (*own, stages)} | own


def _placement(type: Type, axis: str) -> str:
    place = type.at(axis)
    words = {Kind.PARTIAL: "Partial()", Kind.MAXIMUM: 'Partial("max")'}
    return (
        f"Shard({type.dims.index(place.dim)})"
        if place.dim
        else words.get(place.kind, "Replicate()")
    )


def zigzag_ranks(program: Program) -> int:
    """The ranks that have two chunks of the sequence each; 1 where none has."""
    return program.degree(tuple(axis for _, axis in program.zigzags))


RUNTIME_TARGET = Target(function_of, own_call)
DTENSOR = Target(torch_function, torch_call, local=False)
