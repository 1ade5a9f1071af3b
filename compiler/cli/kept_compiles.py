"""The cache of compiles: the next compile of the same plan prints and writes the same.

The files depend on the model of a plan, its text and scalec's own files alone.  A plan with a file
of hardware, or with functions of its own, whose modules it imports, depends on more: it is compiled
anew.
"""

import pickle
import zlib
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ..ir.printer import print_ir
from .kept import Results, key_of

if TYPE_CHECKING:
    from ..analysis.certificate import Proof
    from ..ir import Program
    from ..syntax.diagnostics import Diagnostic
    from ..syntax.source import Source

COMPILES = Results("compiles", most=50)  # of up to some hundred kilobytes each


@frozen
class Compile:
    """The warnings, summary and files (text by name) of a compile; and the proof, unless it was
    skipped.
    """

    warnings: "tuple[Diagnostic, ...]"
    summary: str
    files: dict[str, str]
    proof: "Proof | None"


def compile_key(source: "Source", model: "Program", verify: bool) -> str:
    """The key of a plan's compile; "" where it depends on other files."""
    if model.cluster.hardware or any(op.kind == "call" for op in model.ops):
        return ""
    return key_of(source.path, source.text, print_ir(model), str(verify))


def find(key: str) -> Compile | None:
    """The kept compile of this key, whose certificate says that it was kept; None where there
    is none.
    """
    content = COMPILES.find(key)
    if content is None:
        return None
    try:
        # which runs code: nobody else can write to the user's cache
        result = pickle.loads(zlib.decompress(content))
    except (ValueError, EOFError, zlib.error, pickle.UnpicklingError):
        return None  # cut short by a crash: the plan is compiled
    return _as_kept(result) if isinstance(result, Compile) else None


def keep(key: str, compile_: Compile) -> None:
    """Keeps a compile."""
    COMPILES.keep(key, zlib.compress(pickle.dumps(compile_), level=1))


def _as_kept(compile_: Compile) -> Compile:
    if compile_.proof is None:
        return compile_
    from ..emit.plan_json import as_kept

    files = {**compile_.files, "plan.json": as_kept(compile_.files["plan.json"])}
    return evolve(compile_, files=files, proof=evolve(compile_.proof, kept=True))
