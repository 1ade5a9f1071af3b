"""The checks of a user's function: each calls it and raises Refused where it is not what its
signature says.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from attrs import frozen
from torch import Tensor

from .devices import KeptDevice
from .function import CannotTry, Function, Refused, Results
from .signature import Signature

STEP = 1e-6
"""The step of finite differences, of a function that computes in float64 throughout."""

NOISE_STEP = 1e-7
"""The step along which noise is measured: about that between neighbours in float32."""

LEAST_NOISE = 1e-8
"""A tenth of float32's rounding; that of float64, and second differences of steep functions,
are below it.
"""

LARGER = 10
"""How much larger other slices are when they change."""

DIRECTIONS = 3
"""How many directions each gradient is compared along."""


def check_function(call: Callable[..., object], signature: Signature) -> None:
    """Raises Refused where a function is not what its signature says, with the first thing that
    was seen.
    """
    functions = list(_get_functions(call, signature))
    for function in functions:
        trial = _get_trial(function)
        trial.check_results()
        trial.check_operands_untouched()
        trial.check_repeatable()
        trial.check_slices()
        trial.check_other_slices()
        trial.check_causality()
        trial.check_linearity()
        trial.check_gradients()
    _check_element_types(functions[0])
    _check_device(functions[0])


def _get_functions(call: Callable[..., object], signature: Signature) -> Iterator[Function]:
    """The function at the sizes of each case; at the plan's own sizes if it cannot be called
    with these.
    """
    for sizes in signature.cases:
        function = Function(signature, call, sizes)
        try:
            function.get_results(get_operands(function, seed=0))
        except Refused as refused:
            if refused.kind != "raise" or not signature.instead:
                raise
            instead = function.with_sizes(signature.instead)
            try:
                instead.get_results(get_operands(instead, seed=0))
            except Refused:
                raise refused from None
            yield instead
            return
        yield function


RANGES = ((0.2, 0.8), (1.2, 1.8), (-0.8, -0.2))
"""Where operands are drawn from if the function has no finite results of normal ones, as a
logarithm has not.
"""


def get_operands(function: Function, seed: int) -> list[Tensor]:
    """Random operands of which the function has finite results.

    Raises CannotTry where none are found.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [function.get_shape(dims) for dims in function.signature.operands]
    normal = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    if _has_finite_results(function, normal):
        return [operand.requires_grad_() for operand in normal]
    for low, high in RANGES:
        drawn = [torch.rand(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        operands = [low + (high - low) * part for part in drawn]
        if _has_finite_results(function, operands):
            return [operand.requires_grad_() for operand in operands]
    raise CannotTry("its results are not finite for any random operands")


def _has_finite_results(function: Function, operands: Sequence[Tensor]) -> bool:
    copies = [operand.clone() for operand in operands]
    with torch.no_grad():
        results = function.get_results(copies)
    return all(bool(result.isfinite().all()) for result in results)


def _get_trial(function: Function) -> "_Trial":
    """The trial of a function, with the noise that its results have."""
    operands, others = get_operands(function, seed=0), get_operands(function, seed=1)
    return _Trial(function, operands, others, _get_noise(function, operands))


def _get_noise(function: Function, operands: Sequence[Tensor]) -> float:
    """How far results jump between operands that nearly are the same, for their size; 0 where
    float64 does no better.

    A function may well compute in float32 inside, as norms do for operands of bfloat16.  Along a
    line, a smooth function has second differences of the order of the squared step.
    """
    ways = [_get_normal_like(operand, seed=4) for operand in operands]
    along_line = list[Results]()
    with torch.no_grad():
        for count in range(3):
            moved = [
                operand + count * NOISE_STEP * way
                for operand, way in zip(operands, ways, strict=True)
            ]
            along_line.append(function.get_results(moved))
    noise = 0.0
    for first, second, third in zip(*along_line, strict=True):
        jump = (first.double() - 2 * second.double() + third.double()).abs().max()
        noise = max(noise, float(jump / first.double().abs().max().clamp(min=1e-30)))
    return noise if noise > LEAST_NOISE else 0.0


@frozen
class _Trial:
    """A function, two sets of operands, and the checks of it; `noise` is how exact its results
    are.
    """

    function: Function
    operands: list[Tensor]
    others: list[Tensor]
    noise: float

    @property
    def signature(self) -> Signature:
        return self.function.signature

    @property
    def tolerance(self) -> float:
        """How far results may differ that should be the same."""
        return max(1e-9, 20 * self.noise)

    @property
    def step(self) -> float:
        """The step of finite differences, with which noise and curvature are least."""
        return max(STEP, self.noise ** (1 / 3))

    @property
    def slope_tolerance(self) -> float:
        """How far finite differences may be from a gradient, for its size."""
        return max(1e-4, 100 * self.step**2)

    def check_results(self) -> None:
        """The results have the dims and the element type that the signature gives."""
        results = self.function.get_results(self.operands)
        gives = self.signature.gives
        seen = ", ".join(str(tuple(result.shape)) for result in results)
        stated = ", ".join(str(self.function.get_shape(dims)) for dims in gives)
        if seen != stated:
            names = ", ".join(f"[{', '.join(dims)}]" for dims in gives)
            taken = ", ".join(str(tuple(operand.shape)) for operand in self.operands)
            help = f"the plan's results are {names}, and its tensors had the sizes {taken}"
            raise Refused("dims", f"gives {seen}, not {stated}", help)
        for result in results:
            _check_type(result, torch.float64)

    def check_operands_untouched(self) -> None:
        """Neither the function nor its backward writes to an operand, nor a later call to
        earlier results.
        """
        copies = [operand.detach().clone() for operand in self.operands]
        plain = [operand.detach().clone() for operand in self.operands]
        with torch.no_grad():
            self.function.get_results(plain)
        results = self.function.get_results(self.operands)
        earlier = [result.detach().clone() for result in results]
        _get_gradients(results, self.operands)
        self.function.get_results(self.others)
        for name, operand, free, copy in zip(
            self.signature.names, self.operands, plain, copies, strict=True
        ):
            if not (_are_same_bits(operand, copy) and _are_same_bits(free, copy)):
                seen = f"writes to its operand `{name}`"
                raise Refused(
                    "writes",
                    seen,
                    f"compute on a copy, `{name}.clone()`: others read the operand too",
                )
        for result, copy in zip(results, earlier, strict=True):
            if not _are_same_bits(result, copy):
                seen = "gives results that its next call overwrites"
                raise Refused(
                    "overwrites",
                    seen,
                    "make a new tensor in each call: backward reads the earlier ones",
                )

    def check_repeatable(self) -> None:
        """The same operands give the same bits, forward and backward, whatever the state of
        random generators is.
        """
        generator, state = torch.get_rng_state(), random.getstate()
        first = self._get_bits(seed=1)
        same_seed = self._get_bits(seed=1)
        other_seed = self._get_bits(seed=2)
        torch.set_rng_state(generator)
        random.setstate(state)
        if (count := _count_different(same_seed, first)) != "":
            seen = f"is not the same function in each call: {count} when it is called a second time"
            raise Refused(
                "state",
                seen,
                "let it depend on its arguments alone, not on what earlier calls have left",
            )
        if (count := _count_different(other_seed, first)) != "":
            seen = f"draws random numbers: {count} after another `torch.manual_seed`"
            raise Refused(
                "random",
                seen,
                "use the language's `dropout`: ranks and recomputed layers would draw others",
            )

    def _get_bits(self, seed: int) -> list[Tensor]:
        """Results and gradients after all generators were seeded."""
        cast(Any, torch).manual_seed(seed)
        random.seed(seed)
        results = self.function.get_results(self.operands)
        return [result.detach() for result in results] + _get_gradients(results, self.operands)

    def check_slices(self) -> None:
        """From slices of its operands the function computes the same slices of its results."""
        whole = self._get_detached(self.operands)
        for dim in self.signature.along:
            for words, parts in _get_splits(self.function.sizes[dim]).items():
                found, wanted = list[Tensor](), list[Tensor]()
                for indices in parts:
                    when = f" when it gets {words} of `{dim}`"
                    operands = self._take(self.operands, self.signature.operands, dim, indices)
                    found += self._get_detached(operands, {dim: indices}, when)
                    wanted += self._take(whole, self.signature.gives, dim, indices)
                self._demand_close(found, wanted, dim, f"when the function gets {words} of `{dim}`")

    def check_other_slices(self) -> None:
        """Results at one slice do not change when the other slices change."""
        whole = self._get_detached(self.operands)
        for dim in self.signature.along:
            size = self.function.sizes[dim]
            for index in sorted({0, size - 1}):
                kept = torch.tensor([index])
                mixed = [
                    self._mix(operand, other, dims, dim, index)
                    for operand, other, dims in zip(
                        self.operands, self.others, self.signature.operands, strict=True
                    )
                ]
                found = self._take(self._get_detached(mixed), self.signature.gives, dim, kept)
                wanted = self._take(whole, self.signature.gives, dim, kept)
                self._demand_close(
                    found, wanted, dim, f"of one slice when the other slices of `{dim}` change"
                )

    def _mix(
        self, operand: Tensor, other: Tensor, dims: Sequence[str], dim: str, index: int
    ) -> Tensor:
        """One slice of an operand, with larger ones around it: a norm of all may matter only
        where it is large.
        """
        if dim not in dims:
            return operand.detach()
        at = list(dims).index(dim)
        mixed = LARGER * other.detach()
        mixed.narrow(at, index, 1).copy_(operand.detach().narrow(at, index, 1))
        return mixed

    def _take(
        self,
        tensors: Sequence[Tensor],
        all_dims: Sequence[Sequence[str]],
        dim: str,
        indices: Tensor,
    ) -> list[Tensor]:
        """Some slices along a dim of the tensors that have it."""
        return [
            tensor.detach().index_select(list(dims).index(dim), indices)
            if dim in dims
            else tensor.detach()
            for tensor, dims in zip(tensors, all_dims, strict=True)
        ]

    def _get_detached(
        self,
        operands: Sequence[Tensor],
        indices: Mapping[str, Tensor] | None = None,
        when: str = "",
    ) -> list[Tensor]:
        results = self.function.get_results(operands, indices, when)
        return [result.detach() for result in results]

    def _demand_close(
        self, found: Sequence[Tensor], wanted: Sequence[Tensor], dim: str, when: str
    ) -> None:
        if (count := _count_different(found, wanted, self.tolerance)) == "":
            return
        seen = f"is not slice by slice along `{dim}`: {count} {when}"
        help = (
            f"take `{dim}` out of `over`, or compute each slice from the same slice of the operands"
        )
        if not self.signature.positions:
            help += "; a function that needs to know which slices it has can ask for its positions"
        raise Refused("along", seen, help, dim)

    def check_causality(self) -> None:
        """Results up to a position do not change when all operands change after it."""
        dim = self.signature.causal
        if not dim:
            return
        whole = self._get_detached(self.operands)
        for border in range(1, self.function.sizes[dim]):
            kept = torch.arange(border)
            changed = [
                self._change_after(operand, other, dims, dim, border)
                for operand, other, dims in zip(
                    self.operands, self.others, self.signature.operands, strict=True
                )
            ]
            found = self._take(self._get_detached(changed), self.signature.gives, dim, kept)
            wanted = self._take(whole, self.signature.gives, dim, kept)
            if (count := _count_different(found, wanted, self.tolerance)) != "":
                seen = (
                    f"is not causal along `{dim}`: {count} before position {border} when the"
                    " operands change from there"
                )
                help = f"leave `causal {dim}` out, or compute each position from those up to it"
                raise Refused("causal", seen, help, dim)

    def _change_after(
        self, operand: Tensor, other: Tensor, dims: Sequence[str], dim: str, border: int
    ) -> Tensor:
        """An operand with other numbers from a position on."""
        if dim not in dims:
            return operand.detach()
        kept = operand.detach().narrow(list(dims).index(dim), 0, border)
        after = other.detach().narrow(
            list(dims).index(dim), border, other.shape[list(dims).index(dim)] - border
        )
        return torch.cat([kept, after], list(dims).index(dim))

    def check_linearity(self) -> None:
        """f(2x − 3z) = 2f(x) − 3f(z) in each operand in which the signature says linear."""
        for i in self.signature.linear:
            first = self._get_detached(self.operands)
            other = self._get_detached(self._replace(i, self.others[i]))
            both = self._get_detached(self._replace(i, 2 * self.operands[i] - 3 * self.others[i]))
            combined = [2 * x - 3 * z for x, z in zip(first, other, strict=True)]
            if (count := _count_different(both, combined, self.tolerance)) != "":
                name = self.signature.names[i]
                seen = (
                    f"is not linear in `{name}`: {count} between f(2·{name} − 3·z) and"
                    f" 2·f({name}) − 3·f(z)"
                )
                raise Refused("linear", seen, f"write `{name}` without `linear`", name)

    def _replace(self, at: int, operand: Tensor) -> list[Tensor]:
        return [*self.operands[:at], operand, *self.operands[at + 1 :]]

    def check_gradients(self) -> None:
        """Backward is the derivative of forward, by finite differences along random directions,
        of each result.
        """
        for number in range(len(self.signature.gives)):
            results = self.function.get_results(self.operands)
            weights = _get_normal_like(results[number], seed=2)
            gradients = _get_gradients_of(_get_weighted(results[number], weights), self.operands)
            for i, gradient in enumerate(gradients):
                for seed in range(3, 3 + DIRECTIONS):
                    self._check_slope(
                        number, weights, i, gradient, _get_normal_like(self.operands[i], seed)
                    )

    def _check_slope(
        self, number: int, weights: Tensor, i: int, gradient: Tensor | None, way: Tensor
    ) -> None:
        """Along one direction `way` of operand `i`, a result changes as its gradient says."""
        ends = list[float]()
        for sign in (1, -1):
            moved = self._replace(i, self.operands[i].detach() + sign * self.step * way)
            with torch.no_grad():
                results = self.function.get_results(moved)
            ends.append(float(_get_weighted(results[number], weights)))
        slope = (ends[0] - ends[1]) / (2 * self.step)
        backward = float((gradient * way).sum()) if gradient is not None else 0.0
        size = max(abs(slope), abs(backward), 1.0)
        if not abs(slope - backward) <= self.slope_tolerance * size:  # nor is it NaN
            name = self.signature.names[i]
            figures = (
                f"along one direction {backward:.4g}, where finite differences give {slope:.4g}"
            )
            seen = f"has a wrong gradient by `{name}`: {figures}"
            help = "check `backward` of its autograd function, and what it detaches"
            raise Refused("gradients", seen, help, name)


def _get_normal_like(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


def _get_weighted(result: Tensor, weights: Tensor) -> Tensor:
    """A number that depends on all of a result."""
    return (result * weights).sum()


def _get_gradients_of(number: Tensor, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of a number, by operand; none where it has no gradient.

    Raises Refused where backward fails.
    """
    if not number.requires_grad:
        return [None] * len(operands)
    try:
        return torch.autograd.grad(number, operands, allow_unused=True)
    except Exception as error:
        raise _get_backward_refusal(error) from error


def _get_gradients(results: Results, operands: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all results together, by operand; none where nothing has gradients."""
    weighted = [_get_weighted(result, _get_normal_like(result, seed=2)) for result in results]
    gradients = _get_gradients_of(sum(weighted, torch.zeros(())), operands)
    return [gradient.detach() for gradient in gradients if gradient is not None]


def _get_backward_refusal(error: Exception) -> Refused:
    first_line = str(error).partition("\n")[0]
    seen = f"has a backward that raises {type(error).__name__}: {first_line}"
    return Refused("gradients", seen, "check `backward` of its autograd function")


def _get_splits(size: int) -> dict[str, list[Tensor]]:
    """Ways to cut a dim into slices: in halves, in thirds, one by one, and as a zigzag cuts it."""
    every = torch.arange(size)
    splits = dict[str, list[Tensor]]()
    for count, words in ((2, "half"), (3, "a third")):
        if size % count == 0 and size > count:
            splits[words] = list(every.chunk(count))
    splits["one slice"] = [torch.tensor([i]) for i in sorted({0, 1 % size, size // 2, size - 1})]
    if size > 2:
        splits["the first slice and the last"] = [torch.tensor([0, size - 1])]
    return splits


def _are_same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())


def _count_different(
    found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float = 0.0
) -> str:
    """How many results differ, as in "4 of 8 results differ"; "" where none does."""
    different, count = 0, 0
    if len(found) != len(wanted):
        return f"{len(found)} results where there were {len(wanted)}"
    for x, y in zip(found, wanted, strict=True):
        if x.shape != y.shape:
            return f"a result is {tuple(x.shape)}, not {tuple(y.shape)},"
        close = torch.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        different += int((~close).sum())
        count += x.numel()
    return f"{different} of {count} results differ" if different else ""


def _check_type(result: Tensor, dtype: torch.dtype) -> None:
    if result.dtype != dtype:
        kept, given = (str(each).removeprefix("torch.") for each in (dtype, result.dtype))
        seen = f"gives {given} where its operands are {kept}"
        raise Refused(
            "type", seen, "make new tensors with `dtype=x.dtype`, or end with `.to(x.dtype)`"
        )


def _check_element_types(function: Function) -> None:
    """Results have the element type of the operands, in float32 and bfloat16 too."""
    operands = get_operands(function, seed=0)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = [operand.detach().to(dtype).requires_grad_() for operand in operands]
        word = str(dtype).removeprefix("torch.")
        try:
            results = function.get_results(narrow, when=f" when its operands are {word}")
        except Refused as refused:
            # CPUs lack some ops of narrow types, and a plan may never call it with the other one
            if refused.kind != "raise" or (
                "not implemented" not in refused.seen and word == function.signature.dtype
            ):
                raise
            continue
        for result in results:
            _check_type(result, dtype)


def _check_device(function: Function) -> None:
    """The function mixes its operands with no tensor that it has made on the CPU, and gives
    none.
    """
    operands = get_operands(function, seed=0)
    with KeptDevice(operands) as watched:
        results = function.get_results(operands)
    if watched.mixed:
        seen = f"gives `{watched.mixed}` a tensor on the CPU, wherever its operands are"
        raise Refused(
            "device",
            seen,
            "make new tensors with `device=x.device`, or take them there by `.to(x.device)`",
        )
    if not all(map(watched.is_kept, results)):
        seen = "gives a result on the CPU, wherever its operands are"
        raise Refused("device", seen, "make new tensors with `device=x.device`")
