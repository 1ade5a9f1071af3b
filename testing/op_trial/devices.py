"""Whether a function keeps to the device of its operands, seen where there is only one.

While it runs, every call of torch is looked at.  Tensors that come of the operands, or are made for
a named device, are where the operands are; all others are on the CPU, and a GPU would refuse to mix
them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIXING = ("to", "type_as", "copy_", "__get__", "__set__")
"""Methods that take tensors of several devices."""


class KeptDevice(TorchFunctionMode):
    """Watches the calls of torch; `mixed` names the first that mixes operands with a tensor on
    the CPU.
    """

    def __init__(self, operands: Iterable[Tensor]) -> None:
        super().__init__()
        self.mixed = ""
        # by storage; the tensors are kept so that no other has the same one
        self._kept: dict[int, Tensor] = {}
        for operand in operands:
            self._keep(operand)

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether a tensor is where the operands are."""
        return _storage(tensor) in self._kept

    def _keep(self, tensor: Tensor) -> None:
        self._kept.setdefault(_storage(tensor), tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, and looks at the tensors that it takes and gives."""
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        taken = [*_tensors(args), *_tensors(options.values())]
        kept = [tensor for tensor in taken if self.is_kept(tensor)]
        others = [tensor for tensor in taken if not self.is_kept(tensor) and tensor.dim() > 0]
        if kept and others and name not in MIXING and not self.mixed:
            self.mixed = name
        results = func(*args, **options)
        if kept or _names_device(name, args, options):
            for result in _tensors([results]):
                self._keep(result)
        return results


def _names_device(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a call says on which device its results are to be."""
    by_position = name == "to" and any(isinstance(each, torch.device | str) for each in args)
    return options.get("device") is not None or by_position or name == "cuda"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among some values, and in lists and tuples of them."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(cast("list[Any] | tuple[Any, ...]", value))
    return found
