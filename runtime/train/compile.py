"""Applies torch.compile per layer class: equal layers share one graph."""

from torch import nn

from ..config.environment import recording, sanitizing, tracing
from .launch import warn


def compile_each(model: nn.Module, *classes: type[nn.Module], backend: str = "inductor") -> None:
    """Has torch.compile make a graph of each module of these classes, when it is first called;
    shapes are constants.

    Within a graph nobody sees values and collectives one by one.  Where a variable of the
    environment asks for them, modules are not compiled, and rank 0 says so.
    """
    observers = {
        "SCALEC_SANITIZE=1": sanitizing(),
        "SCALEC_RECORD=1": recording(),
        "SCALEC_LOG=trace": tracing(),
    }
    for observer, is_on in observers.items():
        if is_on:
            warn(f"note: {observer} looks into each layer, so none is compiled")
            return
    for module in model.modules():
        if isinstance(module, classes):
            module.compile(backend=backend, dynamic=False)  # pyright: ignore[reportUnknownMemberType]
