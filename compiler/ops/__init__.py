"""The table of ops: what the modules of this folder define.

A new op is an entry in one of them, and a test.
"""

# pyright: reportUnusedImport=false

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from ..ir import SEQUENCE, Op, Program, Type
from .messages import Message
from .protocol import Attribute, Builder, OpDef, Operand, TypingError
from .roles import Roles
from .saved_tensors import Local
from .vjp import Vjps, gradients


def _entries() -> Iterator[OpDef]:
    """Every entry that is a constant of a module, or in a tuple of entries that is one;
    `builder` reads the table.
    """
    for module in iter_modules(__path__):
        if module.name == "builder":
            continue
        for value in vars(import_module(f"{__name__}.{module.name}")).values():
            constants = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
            for constant in constants:
                if isinstance(constant, OpDef):
                    yield constant


OPS: dict[str, OpDef] = {entry.name: entry for entry in _entries()}
VJPS = Vjps(OPS)
OPS["vjp"] = VJPS.entry()


def messages(program: Program, op: Op, types: Mapping[str, Type]) -> tuple[Message, ...]:
    """The messages that a rank sends each time it does an op, in order.

    `types` are the types of all values.
    """
    entry = OPS.get(op.kind)
    if not entry or not entry.communicates:
        return ()
    operands = tuple(types[name] for name in op.inputs)
    return entry.communicates(Local(program, op, operands))


NO_ROLES = Roles()
"""The roles of an op none of whose dims has a meaning of its own."""


def roles(op: Op, types: Mapping[str, Type]) -> Roles:
    """The dims of an op by what they mean to it; `types` are the types of all values.

    An unknown op has none.
    """
    entry = OPS.get(op.kind)
    if not entry or not entry.roles:
        return NO_ROLES
    return entry.roles([types[name] for name in op.inputs], op)


def moves_positions(op: Op) -> bool:
    """Whether an op moves the positions of the sequence around."""
    entry = OPS.get(op.kind)
    return bool(entry and entry.permutes) and op.names("over") == (SEQUENCE,)


def makes_late_weights(op: Op) -> bool:
    """Whether an op makes gradients of weights that may run beside what other gradients send."""
    entry = OPS[op.kind]
    return entry.late_weights and entry.may_delay(op)


def functions(module: str) -> set[str]:
    """The functions of `module` that emitted programs call for ops."""
    return {entry.function for entry in OPS.values() if entry.function and entry.module == module}
