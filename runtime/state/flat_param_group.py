"""The flat parameters of a layer: weights come and go, gradients are reduced, while the model
computes.

The autograd functions here leave a value as it is, and act when forward and backward come by.
Backward enters a layer where forward has left it, and autograd runs the newest node first.  So
`reshard` comes before all of a layer's backward, `unshard` and `reduce_grads_in_backward` after all
of it (FSDP, arXiv:2304.11277).  Their order follows from the program alone, and so is the same on
all ranks.

Non-goals: buckets without layers, which the step moves explicitly (`comm.collectives`); pipeline
stages (`pipeline`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from ..comm.mesh import Axis, End
from .flat_param import FlatParam

FlatParams = Mapping[str, Any]
"""The groups of the layers of each repeat: a list, or lists in a list where repeats are nested.

With a pipeline, also the chunks of each bucket: a list.
"""

NOTHING: FlatParams = {}


class FlatParamGroup:
    """A layer's flat parameters, one of each bucket, in the order that backward completes their
    gradients.
    """

    def __init__(self, flat_params: Iterable[FlatParam]) -> None:
        self.flat_params = (*flat_params,)

    def line(self) -> Any:
        """The line of the program, in a sanitized run."""
        return self.flat_params[0].shard_axis.line()

    def unshard(self, line: Any, end: End) -> None:
        """Waits for the weights, last for the weights that backward needs first."""
        for flat_param in reversed(self.flat_params):
            if end == "result" or flat_param.resharded:
                flat_param.unshard(line, end)

    def reshard(self) -> None:
        """Frees the weights that come and go."""
        for flat_param in self.flat_params:
            flat_param.reshard()

    def reduce_grads(self, line: Any) -> None:
        """Begins to reduce the gradients, where they are complete."""
        for flat_param in self.flat_params:
            flat_param.reduce_grad(line)


def reduce_grads_in_backward(x: Tensor, params: FlatParamGroup) -> Tensor:
    """x; backward begins to reduce the layer's gradients, after each microbatch or the last one."""
    return _apply(_Unshard, x, params)  # where nothing is sharded there is nothing else to do


def unshard(x: Tensor, params: FlatParamGroup) -> Tensor:
    """x, with the layer's weights gathered, and the next layers' on their way; backward frees them.

    Backward then begins to reduce the gradients, as by `reduce_grads_in_backward`.
    """
    return _apply(_Unshard, x, params)


def reshard(x: Tensor, params: FlatParamGroup) -> Tensor:
    """x, with the layer's weights freed; backward gathers them, and the weights of the layers
    before.
    """
    return _apply(_Reshard, x, params)


def unshard_ahead(axis: Axis, *flat_params: list[Any]) -> None:
    """Begins to gather the weights of every layer that keeps them, layer by layer, each for its
    `unshard`.

    The chunks of a pipeline are gathered stage by stage, each for the first forward of its stage.
    """
    if axis.size == 1:
        return
    line = axis.line()
    for flat_param in sorted(in_order(flat_params), key=lambda flat_param: flat_param.place):
        is_on_axis = flat_param.shard_axis.name == axis.name
        if flat_param.bucket.stages or (is_on_axis and not flat_param.resharded):
            flat_param.begin_unshard(axis, line, "result")


def in_order(flat_params: Iterable[Any]) -> Iterator[FlatParam]:
    """The flat parameters of layers, however nested."""
    for item in flat_params:
        match item:
            case FlatParam():
                yield item
            case FlatParamGroup():
                yield from reversed(item.flat_params)
            case _:
                yield from in_order(item)


class _Unshard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, params: FlatParamGroup) -> Tensor:
        ctx.params, ctx.line = params, params.line()
        params.unshard(ctx.line, "result")
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        ctx.params.reshard()
        ctx.params.reduce_grads(ctx.line)
        return *grad_outputs, None


class _Reshard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, params: FlatParamGroup) -> Tensor:
        ctx.params, ctx.line = params, params.line()
        params.reshard()
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        ctx.params.unshard(ctx.line, "result in backward")
        return *grad_outputs, None


def _apply(function: type[Function], x: Tensor, params: FlatParamGroup) -> Tensor:
    # past `Function.apply`, whose frame is not the program's
    parent: Any = super(Function, function)
    return cast(Tensor, parent.apply(x, params))
