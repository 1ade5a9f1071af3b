"""A user's function as trials call it: what it raises, prints or changes becomes a refusal."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from attrs import evolve, frozen
from torch import Tensor

from .signature import Signature, Sizes

Results = tuple[Tensor, ...]


class Refused(Exception):
    """A function is not what its signature says.

    kind  the check that it failed, in a word
    seen  what was seen, after "the function …"
    help  what to do
    dim   the dim of `over` that is wrong, if one is
    """

    def __init__(self, kind: str, seen: str, help: str, dim: str = "") -> None:
        super().__init__(seen)
        self.kind, self.seen, self.help, self.dim = kind, seen, help, dim


class CannotTry(Exception):
    """A function needs what this machine lacks."""


def load_function(folder: Path, signature: Signature) -> Callable[..., Any]:
    """The function, of a module in `folder`.

    Raises Refused, and CannotTry where a package is not installed.
    """
    path = folder / f"{signature.module}.py"
    module = sys.modules.get(signature.module)
    if module is None or module.__file__ != str(path):
        module = _load_module(signature.module, path)
    function = getattr(module, signature.name, None)
    if not callable(function):
        seen = f"is not there once `{path.name}` has been imported"
        raise Refused("missing", seen, f"define `{signature.name}` at the top of `{path.name}`")
    return function


def _load_module(name: str, path: Path) -> ModuleType:
    """The module of a file, under the name by which files beside it import it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"op trial: {path} is no Python file"
    assert spec.loader is not None, f"op trial: nothing loads {path}"
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known
        if isinstance(error, ModuleNotFoundError):
            raise CannotTry(f"there is no module `{error.name}` here") from error
        seen = f"cannot be imported: {_error_words(error, path)}"
        raise Refused("import", seen, f"make `import {name}` work") from error
    return module


def _error_words(error: BaseException, path: Path) -> str:
    """An error in one line, with the last line of the user's module that it came through."""
    first_line = str(error).partition("\n")[0]
    words = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
    return f"{words} (line {lines[-1]} of `{path.name}`)" if lines else words


@frozen
class Function:
    """A function with its signature, and the sizes of dims that it is called with."""

    signature: Signature
    call: Callable[..., Any]
    sizes: Sizes

    def with_sizes(self, sizes: Sizes) -> "Function":
        """The same function for dims of other sizes."""
        return evolve(self, sizes=sizes)

    def get_shape(self, dims: Sequence[str]) -> tuple[int, ...]:
        """The sizes of some dims."""
        return tuple(self.sizes[dim] for dim in dims)

    def get_positions(self, indices: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
        """The positions that the function asks for, of a rank that has `indices` of some dims
        and all of the others.
        """
        positions = dict[str, Tensor]()
        for keyword, dim in self.signature.positions:
            whole = torch.arange(self.sizes[dim])
            positions[keyword] = indices.get(dim, whole).to(device)
        return positions

    def get_results(
        self,
        operands: Sequence[Tensor],
        indices: Mapping[str, Tensor] | None = None,
        when: str = "",
    ) -> Results:
        """The results; `when` says in words what the operands are.

        Raises Refused where there are none.
        """
        positions = self.get_positions(indices or {}, operands[0].device.type)
        before = _printed_bytes()
        try:
            results: Any = self.call(*operands, *self.signature.constants, **positions)
        except SystemExit as error:
            raise Refused("exit", "calls sys.exit", "raise an error instead") from error
        except Exception as error:
            path = Path(f"{self.signature.module}.py")
            seen = f"raises {_error_words(error, path)}{when}"
            shapes = ", ".join(str(list(operand.shape)) for operand in operands)
            help = (
                f"its tensors had the shapes {shapes}; it must take any sizes of the dims in `over`"
            )
            raise Refused("raise", seen, help) from error
        if _printed_bytes() > before:
            raise Refused("print", "prints", "remove the print: each rank would print in each step")
        return self._get_tensors(results)

    def _get_tensors(self, results: Any) -> Results:
        """The results as a tuple of as many tensors as the signature has.  Raises Refused."""
        several = cast("tuple[Any, ...]", results) if isinstance(results, tuple) else (results,)
        for result in several:
            if not isinstance(result, Tensor):
                seen = f"gives a result of type {type(result).__name__}, not a tensor"
                raise Refused("results", seen, "return a tensor, or a tuple of tensors")
        return several


def _printed_bytes() -> int:
    """How much has been printed, where standard output is a file."""
    sys.stdout.flush()
    try:
        return os.lseek(1, 0, os.SEEK_CUR)
    except OSError:  # a terminal or a pipe: nothing counts there
        return 0
