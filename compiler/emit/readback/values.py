"""The values of a text besides terms: names and what they are bound to, functions, classes and
their modules.

Non-goals: what makes them (`evaluate`, `execute`, `machine`).
"""

import ast

from attrs import Factory, define, field, frozen


@define
class Block:
    """A `with` that keeps a value; nothing but `return` reads it when it is closed."""

    closed: bool = False


@define
class Binding:
    """The value of a name, where it was bound, and the block that it belongs to, if any."""

    value: object
    store: ast.AST | None = None
    block: Block | None = None


@frozen
class Function:
    """A function of the text."""

    node: ast.FunctionDef

    def __str__(self) -> str:
        return self.node.name


@frozen(eq=False)
class Class:
    """A class of the text."""

    node: ast.ClassDef
    init: ast.FunctionDef
    forward: ast.FunctionDef

    def __str__(self) -> str:
        return self.node.name


@define(eq=False)
class Instance:
    """A module: what its `__init__` set, and what of it was read.

    Modules that are made alike are one object.
    """

    of: Class
    attributes: dict[str, object] = Factory(dict[str, object])
    read: set[str] = Factory(set[str])
    is_whole: bool = False  # whether `__init__` has returned

    def __str__(self) -> str:
        return f"{self.of.node.name}(…)"


@frozen
class Modules:
    """`nn.ModuleList(…)` or `nn.ModuleDict(…)`: the modules by key."""

    by_key: dict[object, object] = field(hash=False)


@frozen
class Zip:
    """`zip(…, strict=True)`."""

    domains: tuple[object, ...] = field(hash=False)


@define
class Frame:
    """The names of one call of a function."""

    own: frozenset[str] = frozenset()  # the names that it binds somewhere
    names: dict[str, Binding] = Factory(dict[str, Binding])
    cells: dict[tuple[object, object], object] = Factory(dict[tuple[object, object], object])
    returns: bool = False  # whether a `return` is being run
    # whether the text is the compiler's own, which no name of the module is hidden in
    is_spec: bool = False
