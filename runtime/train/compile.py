"""Applies torch.compile per layer class: equal layers share one graph."""

from torch import nn

from ..config.environment import recording, sanitizing
from .launch import warn


def compile_each(model: nn.Module, *classes: type[nn.Module], backend: str = "inductor") -> None:
    """Has torch.compile make a graph of each module of these classes, when it is first called; shapes are constants.

    Within a graph nobody sees values and collectives one by one: where SCALEC_SANITIZE or SCALEC_RECORD asks for that,
    modules stay as they are, and rank 0 says so.
    """
    if observer := "SCALEC_SANITIZE" if sanitizing() else "SCALEC_RECORD" if recording() else "":
        warn(f"note: {observer}=1 looks into each layer, so none is compiled")
        return
    for module in model.modules():
        if isinstance(module, classes):
            module.compile(backend=backend, dynamic=False)  # pyright: ignore[reportUnknownMemberType]
