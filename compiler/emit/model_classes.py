"""The forward of a step as `nn.Module` classes: one for the model, one for each repeat.

Purpose: one line per named value and coercion; a value that the plan did not name is part of the
line that uses it, but never a coercion after another: a program communicates in the order of its
IR.  Non-goals: the lines themselves (`forward`); the step around forward (`step`).
"""

from collections.abc import Sequence

from attrs import frozen

from ..analysis.recompute import is_recomputed, recomputes_region
from ..config.settings import ON
from ..ir import Op, Program, Region, Stmt, Value, base
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
    frame = Frame(program, find_recomputed_values(program, forward), target)
    inputs = [arg.value for arg in microbatches.args]
    module = Module(class_name(program.name), _model_doc(program, inputs))
    ends = tuple(end.name for end in microbatches.yields[: program.microbatch_results])
    body = Body(frame, module, forward.body, ends)
    for value in inputs:
        body.bind_argument(value.name)
    if target.local and any(bucket.layers for bucket in program.buckets):
        body.bind_flats()
    if program.pipeline:
        StagedBody(body, program.pipeline).write()
    else:
        body.write()
    frame.classes.append(module)
    return Model(tuple(frame.classes), frame.patterns, frame.sizes)


def _model_doc(program: Program, inputs: Sequence[Value]) -> str:
    """The docstring of the model's class, with the shapes of its inputs."""
    name = class_name(program.name)
    subject = f"{name}; forward"
    if program.pipeline:
        subject = f"A rank's stages of {name}; the forward of the last one"
    if program.routes:
        results = "losses and loads of a microbatch"
    elif program.losses > 1:
        results = "a microbatch's token and router losses"
    else:
        results = "the summed token loss of a microbatch"
    shapes = ", ".join(f"{base(value.name)}: {shape(value.type, program)}" for value in inputs)
    return in_lines(f"{subject} returns {results}.  {shapes}")


def compiled_class_names(program: Program, classes: Sequence[Module]) -> str:
    """The names of the classes that torch.compile compiles; "" where it compiles none.

    They are the classes without repeats inside.
    """
    if program.train.compile != ON:
        return ""
    return ", ".join(module.name for module in classes if not module.children)


def find_recomputed_values(program: Program, region: Region) -> set[str]:
    """Results of single forward ops that backward recomputes; forward does not save them."""
    if recomputes_region(program, region):
        return set()
    read = {end.name for end in region.yields}  # values that an op saves, or that are returned
    for stmt in region.body:
        if not _saves_nothing(program, stmt):
            read |= {*reads((stmt,))}
    values = set[str]()
    for stmt in region.body:
        if isinstance(stmt, Region):
            values |= find_recomputed_values(program, stmt)
        # a coercion whose result nothing saves need not be made once more
        elif is_recomputed(program, stmt) and (not _moves(stmt) or stmt.outputs[0].name in read):
            values.add(stmt.outputs[0].name)
    return values


def _moves(stmt: Stmt) -> bool:
    return isinstance(stmt, Op) and stmt.kind == "coerce"


def _saves_nothing(program: Program, stmt: Stmt) -> bool:
    """Whether it is a coercion, or an op whose gradients depend on no operand."""
    if not isinstance(stmt, Op) or _moves(stmt):
        return isinstance(stmt, Op)
    return OPS[stmt.kind].is_linear(len(stmt.inputs)) and not is_recomputed(program, stmt)
