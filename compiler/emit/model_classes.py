"""The forward of a step as `nn.Module` classes: one for the model, one for each repeat.

Purpose: one line per named value and coercion; what the plan did not name stands inside the line that uses it, but
never a coercion behind another: a program communicates in the order of its IR.
Non-goals: the lines themselves (`bodies`); the step around forward (`step`).
"""

from collections.abc import Sequence

from attrs import frozen

from ..config.settings import ON
from ..ir import Program, Region, base
from .forward import Body
from .live_values import made_again
from .module import Frame, Module
from .naming import WIDTH, class_name, shape
from .staged_forward import StagedBody


@frozen
class Model:
    """All classes, innermost first, the model last; and each parameter's name pattern in its state."""

    classes: tuple[Module, ...]
    patterns: dict[str, str]


def model_classes(program: Program, microbatches: Region) -> Model:
    """The classes of a program's forward block, which returns the first value that its microbatches yield."""
    forward = microbatches.body[0]
    assert isinstance(forward, Region), "emit: no forward block"
    frame = Frame(program, made_again(program, forward))
    inputs = [arg.value for arg in microbatches.args]
    given = ", ".join(f"{base(value.name)}: {shape(value.type, program)}" for value in inputs)
    pipeline = program.pipeline
    what = "One of a rank's stages, the last of which gives the" if pipeline else "The"
    given = f"Nothing enters the first one.  {given}" if pipeline else given
    doc = f"{what} sum of token losses of this rank's part of a microbatch.  {given}"
    if len(f'    """{doc}"""') > WIDTH:
        doc = doc.replace("  ", "\n\n    ", 1) + "\n    "
    module, ends = Module(class_name(program.name), doc), (microbatches.yields[0].name,)
    of = (frame, module, forward.body, ends)
    body = StagedBody(*of, pipeline) if pipeline else Body(*of)
    for value in inputs:
        body.bind_argument(value.name)
    if any(bucket.turns for bucket in program.buckets):
        body.bind_flats()
    body.write()
    frame.classes.append(module)
    return Model(tuple(frame.classes), frame.patterns)


def compiled(program: Program, classes: Sequence[Module]) -> str:
    """The names of the classes that torch.compile is given, those without repeats inside; "" where it is given none."""
    return ", ".join(each.name for each in classes if not each.children) if program.train.compile == ON else ""
