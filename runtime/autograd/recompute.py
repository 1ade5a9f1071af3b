"""Activation checkpointing: recomputes calls in backward instead of saving their results
(arXiv:1604.06174).

Saved-tensor hooks that save only a call's operands and parameters, and recompute the other saved
tensors when backward first needs any of them.  No op uses a random generator, so a recomputed call
is equal to the last bit; its collectives run a second time on all ranks.

Decisions, which make sizes differ from run to run (`decide_once`), are made once: a recomputed call
gets the decisions of its first run, even where rounding has changed the values behind them.
"""

import importlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_autograd: Any = importlib.import_module("torch._C._autograd")  # torch's stubs do not know it


class Around:
    """The hooks at the time it is made, as functions; without any, tensors are saved unchanged."""

    def __init__(self) -> None:
        self._hooks = _autograd._top_saved_tensors_default_hooks(False)

    def pack(self, saved: Tensor) -> Any:
        """The saved part of a tensor."""
        if not self._hooks:
            return saved
        return self._hooks[0](saved)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was packed as this."""
        if not self._hooks:
            return packed
        return self._hooks[1](packed)


_T = TypeVar("_T")
_Decide = Callable[[Callable[[], Any]], Any]


def _make(make: Callable[[], Any]) -> Any:
    return make()


# how the innermost call under way decides
_deciding: ContextVar[_Decide] = ContextVar("deciding", default=_make)


def decide_once(make: Callable[[], _T]) -> _T:
    """The result of `make`, without gradients; in a call that is recomputed, the result of the
    first run.
    """
    return _deciding.get()(make)


@contextmanager
def _decide_by(decide: _Decide) -> Generator[None]:
    before = _deciding.set(decide)
    try:
        yield
    finally:
        _deciding.reset(before)


_Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset in a storage."""


class _Enough(Exception):
    """Raised when all tensors that backward asks for are made."""


class Call:
    """A call, and the tensors that backward will ask for: first the tensors saved while it runs,
    then its results, if they are saved.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._function, self._options, self._around = function, options, Around()
        self._operands: list[Any] = []
        for arg in args:
            self._operands.append(self._pack_operand(arg) if isinstance(arg, Tensor) else arg)
        self._operand_storages = _storages(function, args)
        # the storages of results that share none, and which results they are
        self._results: dict[int, int] = {}
        self._inside = 0
        self._views: list[tuple[int, _Place]] = []
        self._recomputed_tensors: dict[int, Tensor] = {}
        self._decisions: list[Any] = []

    @contextmanager
    def first_run(self) -> Generator[None]:
        """The call's own run; inside of a recomputed call, it decides as in that call's first
        run.
        """

        def decide(outer: _Decide, make: Callable[[], Any]) -> Any:
            self._decisions.append(outer(make))
            return self._decisions[-1]

        with (
            saved_tensors_hooks(self.pack, self.unpack),
            _decide_by(partial(decide, _deciding.get())),
        ):
            yield

    def _pack_operand(self, operand: Tensor) -> "_Operand | nn.Parameter":
        if isinstance(operand, nn.Parameter):
            return operand  # functions may use more of it than its elements
        return _Operand(self._around.pack(operand.detach()), operand.requires_grad)

    @contextmanager
    def without(self, results: Any) -> Generator[None]:
        """Within it results, a tensor or several, are not saved; they must live as long as
        anything may save them.
        """
        self._results = {_storage(result): i for i, result in enumerate(_several(results))}
        with saved_tensors_hooks(self.pack_result, self.unpack):
            yield

    def pack(self, saved: Tensor) -> Any:
        """While the call runs: a number instead of a tensor that it makes."""
        if _storage(saved) in self._operand_storages:
            return self._around.pack(saved)
        self._inside += 1
        return _Ticket(self, self._inside - 1)

    def pack_result(self, saved: Tensor) -> Any:
        """After it: a number instead of one of its results."""
        if (result := self._results.get(_storage(saved))) is None:
            return self._around.pack(saved)
        self._views.append(
            (result, (tuple(saved.shape), saved.stride(), int(saved.storage_offset())))
        )
        return _Ticket(self, self._inside + len(self._views) - 1)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was packed as this; each is asked for once."""
        if not (isinstance(packed, _Ticket) and packed.call is self):
            return self._around.unpack(packed)
        if packed.number not in self._recomputed_tensors:
            self._recompute()
        return self._recomputed_tensors.pop(packed.number)

    def _recompute(self) -> None:
        """Recomputes the call, as far as it is needed."""
        self._recomputed_tensors.clear()
        args: list[Any] = []
        for operand in self._operands:
            args.append(self._unpack_operand(operand) if isinstance(operand, _Operand) else operand)
        operand_storages = _storages(self._function, args)

        def keep(saved: Tensor) -> None:
            if _storage(saved) not in operand_storages:
                self._recomputed_tensors[len(self._recomputed_tensors)] = saved.detach()
                if len(self._recomputed_tensors) == self._inside and not self._views:
                    raise _Enough

        try:
            decisions = iter(self._decisions)
            with (
                torch.enable_grad(),
                saved_tensors_hooks(keep, _unread),
                _decide_by(lambda _: next(decisions)),
            ):
                results = _several(self._function(*args, **self._options))
            for number, (i, view) in enumerate(self._views, start=self._inside):
                self._recomputed_tensors[number] = results[i].detach().as_strided(*view)
        except _Enough:
            pass
        assert len(self._recomputed_tensors) == self._inside + len(self._views), (
            "a recomputed call saves other tensors than before"
        )

    def _unpack_operand(self, operand: "_Operand") -> Tensor:
        return self._around.unpack(operand.packed).detach().requires_grad_(operand.requires_grad)


class _Operand(NamedTuple):
    """A tensor as it is saved, and whether it has a gradient."""

    packed: Any
    requires_grad: bool


class _Ticket(NamedTuple):
    """A reference to one of the tensors of a call."""

    call: Call
    number: int


def recomputed(
    function: Callable[..., Any], *args: Any, enabled: bool = True, **options: Any
) -> Any:
    """function(*args, **options), which saves its arguments alone; it may be a module, which has
    parameters.

    Backward recomputes it, up to the last tensor that it needs.  Tensors that it reads must be
    among the arguments.  Unless `enabled` it is an ordinary call.
    """
    if not enabled or not torch.is_grad_enabled():
        return function(*args, **options)
    call = Call(function, args, options)
    with call.first_run():
        return function(*args, **options)


@contextmanager
def recompute(function: Callable[..., Any], *args: Any, **options: Any) -> Generator[Any]:
    """As `recomputed`, but the results, a tensor or several, are not saved either for ops that
    read them in the block.
    """
    if not torch.is_grad_enabled():
        yield function(*args, **options)
        return
    call = Call(function, args, options)
    with call.first_run():
        result = function(*args, **options)
    with call.without(result):
        yield result


def _several(results: Any) -> tuple[Tensor, ...]:
    """The results of a call as a tuple, also if there is one."""
    if isinstance(results, Tensor):
        return (results,)
    return tuple(results)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _storages(function: Callable[..., Any], args: Iterable[Any]) -> set[int]:
    """The storages of operands and of a module's parameters."""
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    return {_storage(x) for x in (*args, *parameters) if isinstance(x, Tensor)}


def _unread(packed: object) -> Tensor:
    raise AssertionError("a recomputed call has no backward")
