"""The names that an emitted program may import, by module: the functions of ops, and what surrounds
them.

The emitter imports what a program uses of them; the read-back refuses any other.
"""

from ..analysis.kernel_tiles import KERNELS as TILED
from ..analysis.kernel_tiles import OTHERS
from ..ir import Op, Program
from ..ir.placements import COERCIONS, coercion_of
from ..ops import OPS, functions
from ..ops.protocol import FUNCTIONAL, KERNELS, RUNTIME, TORCH
from ..ops.user import module_and_function

SPLIT = {name: f"split_{name}" for name in ("embedding", "linear")}
"""By function, the function that a program calls instead if its schedule splits off weight
gradients.
"""


def function_of(op: Op, program: Program) -> str:
    """The function that a program calls for an op."""
    if op.kind == "coerce":
        return coercion_of(op).function
    if op.kind == "call":
        return ".".join(module_and_function(op))
    entry = OPS[op.kind]
    assert entry.function, f"emit: {op.kind} has no function"
    if entry.module == TORCH:
        return f"torch.{entry.function}"
    splits = program.pipeline is not None and program.pipeline.splits
    return SPLIT.get(entry.function, entry.function) if splits else entry.function


_RUNTIME = """
    SGD Account AdamW Batch Bucket Constant Cosine DataSet Expected Experts FlatParamGroup
    FlatParams Folder Input Mesh Metrics ParamGroup Pipeline Plan Positions SmallerMesh StageInput
    Text Tokens TrainState Watch all_gather_ all_reduce_ compile_each normal ones position_ids
    read_hf_names read_schedule recompute recomputed reduce_grads_in_backward reduce_scatter_
    regather reshard rope_frequencies train unshard unshard_ahead weight zeros
""".split()
"""The runtime's names besides ops and coercions."""


def _sort(*names: str) -> tuple[str, ...]:
    """Constants, classes, functions, as formatters order imports."""
    return tuple(
        sorted({*names}, key=lambda name: (not name.isupper(), name.islower(), name.lower()))
    )


IMPORTS: dict[str, tuple[str, ...]] = {
    TORCH: ("Tensor", "nn"),
    FUNCTIONAL: _sort(*functions(FUNCTIONAL)),
    RUNTIME: _sort(
        *_RUNTIME,
        *functions(RUNTIME),
        *(entry.function for entry in COERCIONS.values()),
        *SPLIT.values(),
    ),
    KERNELS: _sort(*OTHERS, *(kernel.name for kernel in TILED.values()), *functions(KERNELS)),
}
"""The names of each module, in the order of its import."""
