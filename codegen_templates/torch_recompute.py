"""Values that backward recomputes one by one, for programs of torch alone (`torch_ops`)."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


@contextmanager
def recompute(function: Callable[..., Any], *args: Any, **options: Any) -> Generator[Any]:
    """A function's results, a tensor or several, which what reads them in the block does not save for backward.

    Nothing is saved that the function makes: `checkpoint` would keep its results.
    """
    if not torch.is_grad_enabled():
        yield function(*args, **options)
        return
    call = Recomputed(partial(function, **options), args)
    with saved_tensors_hooks(call.pack, call.unpack):
        result = function(*args, **options)
    call.results = several(result)
    with saved_tensors_hooks(call.pack_result, call.unpack):
        yield result
    call.results = ()


class Recomputed:
    """A call that backward makes once more, when it first needs a tensor of it; each tensor has a number."""

    def __init__(self, function: Callable[..., Any], args: Iterable[Any]) -> None:
        hooks = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(False)  # of the blocks around this one
        self.pack_outside, self.unpack_outside = hooks or (unchanged, unchanged)
        self.function, self.args = function, [self.held(arg) for arg in args]
        self.given = {address(arg) for arg in args if isinstance(arg, Tensor)}
        self.results: tuple[Tensor, ...] = ()
        self.inside, self.views = 0, list[tuple[int, Callable[[Tensor], Tensor]]]()
        self.made: dict[int, Tensor] = {}

    def held(self, arg: Any) -> Callable[[], Any]:
        """The function that gives an argument in backward."""
        if not isinstance(arg, Tensor) or isinstance(arg, nn.Parameter):
            return lambda: arg
        packed, wanted = self.pack_outside(arg.detach()), arg.requires_grad
        return lambda: self.unpack_outside(packed).detach().requires_grad_(wanted)

    def pack(self, saved: Tensor) -> Any:
        """While the call runs: a number in place of a tensor that it makes."""
        if address(saved) in self.given:
            return self.pack_outside(saved)
        self.inside += 1
        return self, self.inside - 1

    def pack_result(self, saved: Tensor) -> Any:
        """After it: a number in place of a result or a view of one."""
        for i, result in enumerate(self.results):
            if address(result) == address(saved):
                self.views.append((i, view_like(saved)))
                return self, self.inside + len(self.views) - 1
        return self.pack_outside(saved)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was packed as this; each is asked for once."""
        if not (isinstance(packed, tuple) and packed[0] is self):
            return self.unpack_outside(packed)
        _, number = cast(tuple[object, int], packed)
        if number not in self.made:
            self.make()
        return self.made.pop(number)

    def make(self) -> None:
        """Makes the call once more."""
        args, saved = [give() for give in self.args], list[Tensor]()
        given = {address(arg) for arg in args if isinstance(arg, Tensor)}

        def keep(x: Tensor) -> None:
            if address(x) not in given:
                saved.append(x.detach())

        with torch.enable_grad(), saved_tensors_hooks(keep, unchanged):
            results = several(self.function(*args))
        self.made = dict(enumerate([*saved, *(view(results[i]) for i, view in self.views)]))


def view_like(saved: Tensor) -> Callable[[Tensor], Tensor]:
    """The function that makes of a recomputed result the view of it that was saved."""
    local = local_part(saved)
    place = local.shape, local.stride(), local.storage_offset()
    if not isinstance(saved, DTensor):
        return lambda made: local_part(made.detach()).as_strided(*place)
    how: dict[str, Any] = {"shape": saved.shape, "stride": saved.stride(), "run_check": False}
    wrap = partial(DTensor.from_local, device_mesh=saved.device_mesh, placements=saved.placements, **how)
    return lambda made: wrap(local_part(made.detach()).as_strided(*place))


def local_part(x: Tensor) -> Tensor:
    """A rank's part of a DTensor."""
    return getattr(x, "_local_tensor", x)


def address(x: Tensor) -> int:
    """Where a rank's part lies."""
    return local_part(x).untyped_storage().data_ptr()


def several(results: Any) -> tuple[Tensor, ...]:
    """The results of a call, if it is one."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def unchanged(x: Any) -> Any:
    """The argument."""
    return x
