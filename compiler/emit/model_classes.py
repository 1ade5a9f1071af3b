"""The forward of a step as `nn.Module` classes: one for the model, one for each repeat.

Purpose: one line per named value and coercion; a value that the plan did not name is part of the
line that uses it, but never a coercion after another: a program communicates in the order of its
IR.  Non-goals: the lines themselves (`forward`); the step around forward (`step`).
"""

from collections.abc import Sequence

from attrs import frozen

from ..analysis.recompute import is_recomputed, recomputes_region
from ..config.settings import ON
from ..ir import Op, Program, Region, Stmt, base
from ..ops import OPS
from .forward import Body
from .line_writer import reads
from .module import Frame, Module, in_lines
from .naming import class_name, shape
from .staged_forward import StagedBody
from .target import RUNTIME_TARGET, Target


@frozen
class Model:
    """All classes, innermost first, the model last; parameters' name patterns in its state;
    names of dims' sizes.
    """

    classes: tuple[Module, ...]
    patterns: dict[str, str]
    sizes: dict[str, str]


def model_classes(program: Program, target: Target = RUNTIME_TARGET) -> Model:
    """The classes of a program's forward block, which returns the losses and loads that its
    microbatches yield.
    """
    forward, microbatches = program.forward, program.microbatches
    frame = Frame(program, recomputed_values(program, forward), target)
    inputs = [arg.value for arg in microbatches.args]
    given = ", ".join(f"{base(value.name)}: {shape(value.type, program)}" for value in inputs)
    name, pipeline = class_name(program.name), program.pipeline
    whose = (
        f"A rank's stages of {name}; the forward of the last one"
        if pipeline
        else f"{name}; forward"
    )
    losses = (
        "a microbatch's token and router losses"
        if program.losses > 1
        else "the summed token loss of a microbatch"
    )
    losses = "losses and loads of a microbatch" if program.routes else losses
    doc = in_lines(f"{whose} returns {losses}.  {given}")
    module, ends = Module(name, doc), tuple(end.name for end in microbatches.yields[: program.made])
    of = (frame, module, forward.body, ends)
    body = StagedBody(*of, pipeline) if pipeline else Body(*of)
    for value in inputs:
        body.bind_argument(value.name)
    if target.local and any(bucket.layers for bucket in program.buckets):
        body.bind_flats()
    body.write()
    frame.classes.append(module)
    return Model(tuple(frame.classes), frame.patterns, frame.sizes)


def compiled(program: Program, classes: Sequence[Module]) -> str:
    """The names of the classes that torch.compile compiles, those without repeats inside; ""
    where it compiles none.
    """
    return (
        ", ".join(each.name for each in classes if not each.children)
        if program.train.compile == ON
        else ""
    )


def recomputed_values(program: Program, region: Region) -> set[str]:
    """Results of single forward ops that backward recomputes; forward does not save them."""
    if recomputes_region(program, region):
        return set()
    inner = [recomputed_values(program, stmt) for stmt in region.body if isinstance(stmt, Region)]
    read = {
        name for stmt in region.body if not _saves_nothing(program, stmt) for name in reads((stmt,))
    }
    read |= {end.name for end in region.yields}
    own = [stmt for stmt in region.body if isinstance(stmt, Op) and is_recomputed(program, stmt)]
    own = [op for op in own if not _moves(op) or op.outputs[0].name in read]
    return {op.outputs[0].name for op in own}.union(*inner)


def _moves(stmt: Stmt) -> bool:
    return isinstance(stmt, Op) and stmt.kind == "coerce"


def _saves_nothing(program: Program, stmt: Stmt) -> bool:
    """Whether it is a coercion, or an op whose gradients depend on no operand."""
    if not isinstance(stmt, Op) or _moves(stmt):
        return isinstance(stmt, Op)
    return OPS[stmt.kind].is_linear(len(stmt.inputs)) and not is_recomputed(program, stmt)
