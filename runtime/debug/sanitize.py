"""SCALEC_SANITIZE=1: compares, by hash, values that the plan says are equal on several ranks.

It compares: the operand and the result of each coercion, forward and backward, where they are I or
R; inputs and metrics of each step; and parameters, their working copies and optimizer state before
the first step, and before and after each update.  In a pipeline, it compares parameters that
several stages share over these stages, and each message's values with the hashes that the sender
made.  The first value that differs ends the run with its name, step, ranks and line of the plan.

Copies are equal to the last bit.  All ranks compute them from equal bits by the same kernels, made
deterministic, and results of reductions are the same everywhere: gloo's ring reduces each chunk on
one rank and hands it on as it is (gloo/allreduce.cc), and so does NCCL: "all ranks should get the
same value, always" (its maintainers in NVIDIA/nccl#855 and #434), with reductions in the switch
too, though they may differ from call to call (#1497).  So no tolerance is needed; but all ranks
need the same kind of processor, versions, and, on CPUs, number of threads.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor, nn

from ..comm.mesh import Axis, Copies, Crossing, End, Mesh, Role
from ..config.plan import Metrics
from ..data.loader import Batch, Input
from ..errors import RunError
from .compare import Comparison, Difference, differs
from .source_lines import Line, calling_line

_P = ParamSpec("_P")


class Sanitizer:
    """The watch of a sanitized run on this rank.

    A check that raises, raises on all ranks of the axis.
    """

    def __init__(self, device: torch.device) -> None:
        self._comparison = Comparison(device)
        self._step = "before the first step"
        self._modules: list[str] = []  # modules whose forward runs, outermost first
        self._microbatch = 0  # the number in this step, from 1
        self._model = nn.Module()
        self._copies: list[Copies] = []

    def begin(self, step: str) -> None:
        """Begins `step`."""
        self._step, self._microbatch = step, 0

    def see_state(self, model: nn.Module, copies: Sequence[Copies]) -> None:
        """Watches a model; `copies` is the memory of its state."""
        self._model, self._copies = model, [*copies]
        for name, module in cast(Any, model).named_modules():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave)

    def _enter(self, name: str, *_: Any) -> None:
        self._modules.append(name)
        self._microbatch += name == ""

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def here(self) -> Line:
        """The line of the program that calls a coercion."""
        if not self._modules:
            return calling_line("", 0)
        return calling_line(self._modules[-1], self._microbatch)

    def see_coercion(self, x: Tensor, axis: Axis, line: Line, end: End) -> None:
        """Compares a coercion's operand or result, or the gradient of one.

        RunError if it differs over the axis.
        """
        difference = self._comparison.first([x], axis)
        if not difference:
            return
        microbatch = f"microbatch {line.microbatch}, " if line.microbatch else ""
        phase = "forward" if end in ("operand", "result") else "backward"
        name = self._find_parameter(x, difference) or _describe_value(x, difference, line, end)
        raise RunError(
            f"{self._step}, {microbatch}{phase}: {differs(name, axis, difference)}; at"
            f" {line.place}{self._cause(axis)}"
        )

    def see_exchange(self, to: Sequence[int], of: Sequence[int], axis: Axis, line: Line) -> None:
        """RunError, on all ranks, if one is about to send another number of rows than its peer
        waits for.
        """
        if difference := self._comparison.first_exchange(to, of, axis):
            raise RunError(f"{self._step}: {difference}; at {line.place}")

    def microbatch(self, number: int) -> None:
        """Begins this microbatch, from 0."""
        self._microbatch = number

    def hashes(self, values: Sequence[Tensor]) -> Tensor:
        """The hashes that `arrived` compares."""
        return self._comparison.hashes(values)

    def check_message(self, values: Sequence[Tensor], hashes: Tensor, message: Crossing) -> None:
        """RunError, on the receiving rank alone, if a message's values are not the ones that were
        sent.
        """
        differs_from_hash = (self.hashes(values) != hashes).any(1)
        if not differs_from_hash.any():
            return
        name, phase = f"`{message.names[int(differs_from_hash.nonzero()[0])]}`", "forward"
        if message.is_gradient:
            name, phase = f"the gradient of {name}", "backward"
        raise RunError(
            f"{self._step}, microbatch {message.microbatch + 1}, {phase}: {name} has come to stage"
            f" {message.stage} otherwise than it was sent, from rank {message.source} to rank"
            f" {message.target}; at {self.here().place}"
        )

    def see_update_begin(self) -> None:
        """RunError if a parameter, its working copy or its optimizer state differs.

        Call it before an update: afterwards rounding may have made values equal that differed when
        they were used.
        """
        self._compare_copies("state", "working")

    def see_update_end(self) -> None:
        """RunError if a parameter or its optimizer state differs."""
        self._compare_copies("state")

    def same(self, values: Mapping[str, Tensor], axis: Axis, when: str) -> None:
        """RunError if one of the named values differs over the axis."""
        if difference := self._comparison.first([*values.values()], axis):
            name, x = [*values.items()][difference.number]
            words = differs(f"`{name}`{_describe_index(x, difference)}", axis, difference)
            raise RunError(f"{self._step}, {when}: {words}")

    def _compare_copies(self, *roles: Role) -> None:
        by_axis: dict[Axis, list[Copies]] = {}
        for copies in self._copies:
            if copies.role in roles:
                by_axis.setdefault(copies.axis, []).append(copies)
        when = f"{self._step}, update" if self._microbatch else self._step
        for axis, group in by_axis.items():
            if difference := self._comparison.first_copy(group, axis, self._model):
                raise RunError(f"{when}: {difference}")

    def _find_parameter(self, x: Tensor, difference: Difference) -> str:
        """The parameter whose memory holds the first element of x that differs; "" if there is
        none.
        """
        address = x.data_ptr() + (difference.index or 0) * x.element_size()
        for copy in self._copies:
            offset = address - copy.tensor.data_ptr()
            if 0 <= offset < copy.tensor.nbytes:
                return copy.prefix + "".join(copy.element(offset // copy.tensor.element_size()))
        return ""

    def _cause(self, axis: Axis) -> str:
        """Words for state that differs over the axis and should not; "" if there is none.

        All ranks of a failed coercion call it.
        """
        names = set(axis.name.split("*"))
        copies = list[Copies]()
        for copy in self._copies:
            if copy.role != "gradient" and names <= set(copy.axis.name.split("*")):
                copies.append(copy)
        difference = self._comparison.first_copy(copies, axis, self._model)
        return f"; before it, {difference}" if difference else ""


def _describe_value(x: Tensor, difference: Difference, line: Line, end: End) -> str:
    """For instance `the gradient of `a` at [0, 1, 5] in layers.1`."""
    name = line.operand if "operand" in end else line.result
    words = f"`{name}`{_describe_index(x, difference)}"
    if "gradient" in end:
        words = f"the gradient of {words}"
    if line.module:
        words += f" in {line.module}"
    return words


def _describe_index(x: Tensor, difference: Difference) -> str:
    if difference.index is None or not x.dim():
        return ""
    indices = torch.unravel_index(torch.tensor(difference.index), x.shape)
    return f" at {[int(index) for index in indices]}"


def observe(
    function: Callable[_P, Metrics],
    mesh: Mesh,
    inputs: Mapping[str, Input],
    word: str,
    steps_done: int,
) -> Callable[_P, Metrics]:
    """`train_step` or `eval_step`, with its batch and metrics compared; messages name its calls by
    `word` and number, from `done` + 1.
    """
    watch, numbers = mesh.watch, count(steps_done + 1)
    assert isinstance(watch, Sanitizer), "sanitize: the mesh was made without a sanitizer"

    def run(*args: _P.args, **options: _P.kwargs) -> Metrics:
        watch.begin(f"{word} {next(numbers)}")
        batch = next(argument for argument in args if isinstance(argument, Batch))
        for name, layout in inputs.items():
            split = set[str]().union(*layout.split.values())
            watch.same({name: getattr(batch, name)}, mesh.without(split), "inputs")
        metrics = function(*args, **options)
        values = {name: value for name, value in vars(metrics).items() if isinstance(value, Tensor)}
        for number, load in enumerate(metrics.loads):
            values[f"load {number}"] = load
        watch.same(values, mesh.without(()), "metrics")
        return metrics

    return run


def require_determinism() -> None:
    """Has ops take their deterministic form from now on, and raise if they have none.

    Call it before CUDA is used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # `use_deterministic_algorithms` would import torch._inductor
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
