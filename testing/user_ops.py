"""Whether a function is what a plan's `op` says of it: what no proof shows, since it takes the plan's word.

Purpose: `assert_op`, which runs the function in float64.  Non-goals: speed, other element types, a GPU.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from ..compiler.frontend.load_plan import gather
from ..compiler.ops.user import LEAD
from ..compiler.syntax.diagnostics import Diagnostics
from ..compiler.syntax.limits import load
from ..compiler.syntax.tree import Name, UserOp

if TYPE_CHECKING:  # heavy, and the other checks do without
    from torch import Tensor

LEADING = (2, 3)
"""The sizes of the dims that `..` means."""

SIZE = 4
"""The size of any other dim."""


def assert_op(plan: Path, name: str, *numbers: float, **sizes: int) -> None:
    """Holds the function of the op `name`, declared in a plan, to its signature, on random numbers.

    Its results have the dims that are stated; slices along each dim that it works along give the slices of its results;
    it is linear where it is said to be; its gradients are those of finite differences (`torch.autograd.gradcheck`).
    `numbers` are its arguments after its tensors, `sizes` those of dims that cannot be 4.  Raises AssertionError.
    """
    declared = next((op for op in gather(load(plan), Diagnostics()).ops if op.name.name == name), None)
    assert declared, f"{plan} declares no op {name}"
    check = _Check(declared, _function(plan.parent, declared.function.value), numbers, sizes)
    operands = check.operands(seed=0)
    check.slices(operands)
    check.linearity(operands, check.operands(seed=1))
    check.gradients(operands)


def _function(folder: Path, origin: str) -> "Callable[..., Tensor | tuple[Tensor, ...]]":
    """The function `module:function` of a module in `folder`."""
    module, _, name = origin.partition(":")
    spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
    assert spec, f"there is no {module}.py in {folder}"
    assert spec.loader, f"nothing loads {module}.py"
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


@frozen
class _Check:
    op: UserOp
    function: "Callable[..., Tensor | tuple[Tensor, ...]]"
    numbers: Sequence[float]
    sizes: dict[str, int]

    def operands(self, seed: int) -> "list[Tensor]":
        """Random tensors of the signature's dims."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        shapes = [self._shape(operand.dims) for operand in self.op.operands if operand.dims]
        return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]

    def slices(self, operands: "Sequence[Tensor]") -> None:
        """The function of slices is the slices of the function, along each dim that it works along."""
        results, gives = self._called(operands), self.op.gives
        found = ", ".join(str(tuple(each.shape)) for each in results)
        stated = ", ".join(map(str, map(self._shape, gives)))
        assert found == stated, f"{self.op.name} gives {found}, not {stated}"
        for dim in _names(self.op.along):
            for i in range(self._size(dim)):
                parts = [self._slice(x, dims, dim, i) for x, dims in zip(operands, self._takes(), strict=True)]
                whole = [self._slice(y, dims, dim, i) for y, dims in zip(results, gives, strict=True)]
                self._same(self._called(parts), whole, f"work along {_word(dim)}")

    def linearity(self, operands: "Sequence[Tensor]", others: "Sequence[Tensor]") -> None:
        """f(2x − 3z) = 2f(x) − 3f(z) in each operand that is said to be linear."""
        tensors = [operand for operand in self.op.operands if operand.dims]
        for i in (i for i, operand in enumerate(tensors) if operand.is_linear):
            at = (others[i], 2 * operands[i] - 3 * others[i])
            apart, both = (self._called([*operands[:i], x, *operands[i + 1 :]]) for x in at)
            first = self._called(operands)
            combined = [2 * x - 3 * z for x, z in zip(first, apart, strict=True)]
            self._same(both, combined, f"be linear in `{tensors[i].name}`")

    def gradients(self, operands: "Sequence[Tensor]") -> None:
        """Backward is the derivative of forward."""
        from torch.autograd import gradcheck
        from torch.autograd.gradcheck import GradcheckError

        try:
            gradcheck(lambda *xs: self._called(xs), tuple(operands))
        except GradcheckError as error:
            raise AssertionError(f"the gradients of {self.op.name} are wrong: {error}") from None

    def _called(self, operands: "Sequence[Tensor]") -> "tuple[Tensor, ...]":
        found = self.function(*operands, *self.numbers)
        return found if isinstance(found, tuple) else (found,)

    def _takes(self) -> list[tuple[Name, ...]]:
        return [operand.dims for operand in self.op.operands if operand.dims]

    def _shape(self, dims: Sequence[Name]) -> tuple[int, ...]:
        return tuple(map(self._size, _names(dims)))

    def _size(self, dim: str) -> int:
        return LEADING[int(dim[-1])] if dim.startswith(LEAD) else self.sizes.get(dim, SIZE)

    def _slice(self, x: "Tensor", dims: Sequence[Name], dim: str, index: int) -> "Tensor":
        names = list(_names(dims))
        return x.narrow(names.index(dim), index, 1) if dim in names else x

    def _same(self, found: "Sequence[Tensor]", expected: "Sequence[Tensor]", claim: str) -> None:
        import torch

        alike = all(
            x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=1e-9)
            for x, y in zip(found, expected, strict=True)
        )
        assert alike, f"`{self.op.name}` is said to {claim}, but does not"


def _names(dims: Sequence[Name]) -> Iterator[str]:
    """The dims one by one: `..` is `..0` and `..1`."""
    for dim in dims:
        yield from (f"{LEAD}{i}" for i in range(len(LEADING))) if dim.name == LEAD else [dim.name]


def _word(dim: str) -> str:
    return f"`{LEAD}`" if dim.startswith(LEAD) else f"`{dim}`"
