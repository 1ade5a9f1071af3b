"""The lines of `build` in a program of torch alone: the model or its stages, sharding, the
optimizer.
"""

from collections.abc import Iterator

from ...ir import Program
from ..model_classes import Model
from ..naming import DTYPES
from . import staged
from .sharded import optimizer_lines, sharding_lines


def build_lines(program: Program, model: Model) -> Iterator[str]:
    """The lines of `build`, without the last, which returns model and optimizer."""
    name, master = model.classes[-1].name, DTYPES[program.params[0].type.dtype]
    cast = "" if master == DTYPES["f32"] else f".to({master})"
    if program.pipeline:
        yield from staged.stage_construction_lines(program, model.patterns, name, cast)
    else:
        yield f"model = {name}(mesh){cast}"
    yield from sharding_lines(program, model.patterns)
    if program.pipeline:
        yield from staged.pipeline_construction_lines(program, model.patterns)
    yield from optimizer_lines(program, model.patterns)
    if program.train.precision == "fp16":
        yield "start_loss_scale(optimizer)"
