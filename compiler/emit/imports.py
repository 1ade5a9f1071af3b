"""The names that an emitted program may import, by module: the functions of ops, and what surrounds
them.

The emitter imports what a program uses of them; the read-back refuses any other.
"""

from collections.abc import Sequence
from symtable import Symbol, SymbolTable, symtable

from attrs import frozen

from ..analysis.kernel_tiles import KERNELS as TILED
from ..analysis.kernel_tiles import OTHERS, Used
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
    SGD AdamW Batch Bucket Constant Cosine DataSet Experts FlatParamGroup FlatParams Folder Input
    Mesh Metrics ParamGroup Pipeline Plan Positions SmallerMesh StageInput Text Tokens TrainState
    Watch all_gather_ all_reduce_ compile_each normal ones position_ids read_hf_names
    read_predictions read_schedule recompute recomputed reduce_grads_in_backward reduce_scatter_
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


@frozen
class Imports:
    """The names that a program imports of each module, in the order of its lines."""

    functional: list[str]
    runtime: list[str]
    kernels: list[str]


def get_imports(code: str, kernels: Sequence[Used]) -> Imports:
    """The imports that `code` needs, which is a program without its imports.

    The program makes functions of `kernels` itself.  A name that both kernels and the runtime have
    is imported from the kernels in a program with any.
    """
    used = names_in(code) - {kernel.function for kernel in kernels}
    from_kernels = [name for name in IMPORTS[KERNELS] if name in used] if kernels else []
    others = used - {*from_kernels}
    return Imports(
        [name for name in IMPORTS[FUNCTIONAL] if name in others],
        [name for name in IMPORTS[RUNTIME] if name in others],
        from_kernels,
    )


def names_in(text: str) -> set[str]:
    """The names that a text uses, but for the parameters and variables of its functions.

    Python's own table of symbols tells names from attributes, keywords, strings and comments.
    """
    scopes, used = [symtable(text, "train.py", "exec")], set[str]()
    for scope in scopes:
        scopes += scope.get_children()
        used |= {name.get_name() for name in scope.get_symbols() if _is_global(scope, name)}
    return used


def _is_global(scope: SymbolTable, name: Symbol) -> bool:
    return name.is_global() or (scope.get_type() == "module" and name.is_referenced())
