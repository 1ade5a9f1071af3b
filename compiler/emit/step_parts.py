"""What the lines of a step are made of: groups of ranks, functions under construction, sums of squares.

Non-goals: which lines there are (`step`).
"""

from attrs import define, field, frozen

from .naming import WIDTH, call, exploded, literal


@frozen
class Ranks:
    """A group of ranks: over some axes, or some of the ranks of one."""

    axes: tuple[str, ...]
    among: tuple[str, ...] = ()

    def asked(self) -> str:
        """How the mesh is asked for it."""
        if self.among:
            return f"mesh.among({', '.join([*map(literal, self.axes), *self.among])})"
        return f"mesh.axis({', '.join(map(literal, self.axes))})"


@define
class Function:
    """The lines of one function, and the groups over axes that it asks the mesh for."""

    groups: dict[Ranks, str] = field(factory=dict[Ranks, str])  # the names
    lines: list[str] = field(factory=list[str])

    def add(self, code: str, comment: str) -> None:
        """A line with its comment, if any."""
        self.lines += lined(code, comment) if comment else [code]

    def all(self) -> list[str]:
        """The groups first."""
        groups = [f"{name} = {ranks.asked()}" for ranks, name in self.groups.items()]
        return [*(["mesh = state.mesh"] if groups else []), *groups, *self.lines]


def lined(code: str, comment: str) -> list[str]:
    """A line with its comment, which stands before it where both are too long for one."""
    indent = " " * (len(code) - len(code.lstrip()))
    fits = "\n" not in code and len(f"    {code}  # {comment}") <= WIDTH
    return [f"{code}  # {comment}"] if fits else [f"{indent}# {comment}", code]


@frozen
class Squares:
    """A sum of squares of gradients, and the group over whose ranks it is summed, if any."""

    operands: tuple[str, ...]
    group: str = ""
    once: str = ""

    def text(self, indent: int, others: int = 1) -> str:
        """The expression, an argument a line where it is too long for one that has so many `others` characters."""
        arguments = [*self.operands, *([f"once={self.once}"] if self.once else [])]
        if not self.group:
            return call("sum_squares", arguments, indent, others)
        line = f"all_reduce_(sum_squares({', '.join(arguments)}), {self.group})"
        if indent + len(line) + others <= WIDTH:
            return line
        return exploded("all_reduce_", [call("sum_squares", arguments, indent + 4), self.group], indent)
