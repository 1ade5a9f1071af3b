"""Parts of a step's lines: groups of ranks, functions under construction, sums of squares, moves of flat buffers.

Non-goals: which lines there are (`step`), what layers move by themselves (`loop_hooks`).
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field, frozen

from ..analysis.stage_buckets import chunks
from ..ir import Bucket, Kind, Op, Program
from ..ir.placements import ends
from .loop_hooks import gathered, repeat_of, working
from .naming import WIDTH, axes_word, call, exploded, literal


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
    """A line with its comment, which precedes it where both are too long for one line."""
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
        """The expression, with an argument a line where it is too long for one line with `others` more characters."""
        arguments = [*self.operands, *([f"once={self.once}"] if self.once else [])]
        if not self.group:
            return call("sum_squares", arguments, indent, others)
        line = f"all_reduce_(sum_squares({', '.join(arguments)}), {self.group})"
        if indent + len(line) + others <= WIDTH:
            return line
        return exploded("all_reduce_", [call("sum_squares", arguments, indent + 4), self.group], indent)


# ---- flat buffers that move in parts, of layers or of a pipeline's chunks


def runs(program: Program) -> list[list[Bucket]]:
    """The buckets whose layers or chunks the step gathers; neighbours of the same layers go together."""
    moved = {bucket.dim: bucket for bucket in program.buckets if bucket.per_layer or program.pipeline}
    runs: list[list[Bucket]] = []
    for op in program.region.body:
        if isinstance(op, Op) and op.kind == "coerce" and ends(op)[0].kind is Kind.SHARDED:
            if not (bucket := moved.get("".join(op.outputs[0].type.dims[-1:]))):
                continue
            last = runs[-1][-1] if runs else None
            if last and (last.layers, last.shard_axes) == (bucket.layers, bucket.shard_axes):
                runs[-1].append(bucket)
            else:
                runs.append([bucket])
    return runs


def unshard_ahead(program: Program, run: Sequence[Bucket], axis: str, patterns: Mapping[str, str]) -> tuple[str, str]:
    """The line that begins to gather buckets over an axis, and its comment."""
    names = [bucket.name if program.pipeline else repeat_of(patterns[bucket.params[0]]) for bucket in run]
    flat_params = (f"flat_params[{literal(name)}]" for name in dict.fromkeys(names))
    line = call("unshard_ahead", [axis, *flat_params], 4, after=0)
    if program.pipeline:
        return (
            line,
            f"S→R  {_largest(program, *run)} × {working(program, *run)} a stage, awaited before its first forward",
        )
    layers = " × ".join(f"{program.size(dim)}" for dim in run[0].layers)
    return line, f"S→R  {layers} × {gathered(program, *run)}, awaited before each layer"


def stage_reductions(program: Program) -> Iterator[str]:
    """Comments on how stages reduce the chunks of each bucket, in the order of the IR."""
    for bucket in program.buckets:
        over = [("P→S", bucket.shard_axes), ("P→I", bucket.reduce_axes)]
        if changes := ", ".join(f"{change} over {axes_word(axes, program)}" for change, axes in over if axes):
            sizes = f"{_largest(program, bucket)} × {program.reduce_dtype(bucket)}"
            yield f"# {bucket.name}: {changes}  {sizes} a stage, after its last backward"


def _largest(program: Program, *of: Bucket) -> str:
    """The most elements that any rank has of one chunk of each of these buckets."""
    own = [chunk for each in chunks(program) for chunk in each]
    sizes = [max(chunk.size for chunk in own if chunk.bucket == bucket.name) for bucket in of]
    text = " + ".join(f"{size:,}" for size in sizes)
    return f"up to {f'({text})' if len(of) > 1 else text}"
