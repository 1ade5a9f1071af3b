"""Whether a function is what a plan's `op` says of it: what no proof shows, since it takes the
plan's word.

Purpose: `assert_op`, which makes the checks of `op_trial` in the process of a test, and torch's
`gradcheck`.  Non-goals: speed, a GPU; calls of the op in the plan's model.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..compiler.analysis.op_trials import LEADING, OTHER, case_sizes
from ..compiler.frontend.load_plan import gather
from ..compiler.ops.user import LEAD
from ..compiler.syntax.diagnostics import Diagnostics
from ..compiler.syntax.limits import load
from ..compiler.syntax.tree import Name, UserOp
from .op_trial.signature import Signature

LEAD_DIMS = (f"{LEAD}0", f"{LEAD}1")
"""The dims that `..` means here."""


def assert_op(plan: Path | str, name: str, *numbers: float, **sizes: int) -> None:
    """Holds the function of the op `name`, declared in a plan, to its signature, on random numbers.

    These are the checks of `scalec check`, and `torch.autograd.gradcheck`: dims and element types
    of results, slices along each dim of `over`, linearity, gradients, the same bits in each call,
    operands that are not written to.  `numbers` are its arguments after its tensors, `sizes` those
    of dims that cannot be 4 and 8.  Raises AssertionError.
    """
    from .op_trial.checks import check_function
    from .op_trial.function import CannotTry, Refused, load_function

    path = Path(plan)
    declared = next(
        (op for op in gather(load(path), Diagnostics()).ops if op.name.name == name), None
    )
    assert declared, f"{path} declares no op {name}"
    signature = _signature(declared, numbers, sizes)
    try:
        with _modules_kept(signature.module):
            function = load_function(path.parent, signature)
        check_function(function, signature)
    except Refused as refused:
        raise AssertionError(_said(name, refused.kind, refused.dim, refused.seen)) from None
    except CannotTry as reason:
        raise AssertionError(f"{name} cannot be tried: {reason}") from None
    _check_all_gradients(name, function, signature)


@contextmanager
def _modules_kept(name: str) -> Generator[None]:
    """Takes back what is imported under a name: the module of another plan may have it."""
    known = sys.modules.pop(name, None)
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        if known is not None:
            sys.modules[name] = known


def _signature(op: UserOp, numbers: Sequence[float], sizes: dict[str, int]) -> Signature:
    """The signature of an op whose `..` are two dims."""
    tensors = [operand for operand in op.operands if operand.dims]
    operands = tuple(_spelled_out(operand.dims) for operand in tensors)
    dims = dict.fromkeys(dim for each in operands for dim in each)
    cases = (
        dict(case_sizes(dims, LEAD_DIMS, leading, other)) | sizes
        for leading, other in zip(LEADING, OTHER, strict=True)
    )
    return Signature(
        function=op.function.value,
        names=tuple(operand.name.name for operand in tensors),
        operands=operands,
        gives=tuple(map(_spelled_out, op.gives)),
        along=_spelled_out(op.along),
        linear=tuple(number for number, operand in enumerate(tensors) if operand.is_linear),
        constants=tuple(numbers),
        positions=tuple((each.keyword.name, each.dim.name) for each in op.positions),
        causal=op.causal.name if op.causal else "",
        dtype="float64",
        cases=tuple(cases),
        instead={},
    )


def _spelled_out(dims: Sequence[Name]) -> tuple[str, ...]:
    """The dims one by one, with two in the place of `..`."""
    return tuple(dim for name in dims for dim in (LEAD_DIMS if name.name == LEAD else (name.name,)))


def _said(name: str, kind: str, dim: str, seen: str) -> str:
    """The message of a test about a function that is not what its signature says."""
    word = LEAD if dim in LEAD_DIMS else dim
    claims = {
        "along": f"`{name}` is said to work along `{word}`, but does not: it {seen}",
        "linear": f"`{name}` is said to be linear in `{word}`, but does not: it {seen}",
        "gradients": f"the gradients of {name} are wrong: it {seen}",
    }
    return claims.get(kind, f"{name} {seen}")


def _check_all_gradients(name: str, function: object, signature: Signature) -> None:
    """Each gradient by itself, as torch compares them.  Raises AssertionError."""
    from torch.autograd import gradcheck
    from torch.autograd.gradcheck import GradcheckError

    from .op_trial.checks import get_operands
    from .op_trial.function import Function

    assert callable(function), "user ops: a function is loaded"
    trial = Function(signature, function, signature.cases[0])
    try:
        gradcheck(lambda *operands: trial.get_results(operands), tuple(get_operands(trial, seed=0)))
    except GradcheckError as error:
        raise AssertionError(f"the gradients of {name} are wrong: {error}") from None
