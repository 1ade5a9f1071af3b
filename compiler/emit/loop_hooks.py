"""The lines around a layer of a repeat that move its flat parameters: a gather before, a free
after.

Purpose: one line each for all buckets of the layer; the comment says what they communicate.
Autograd runs their backward from the last line to the first, which is the order of the IR: second
gathers, the layer's own backward, reductions.  Non-goals: what the step does with buckets (`step`).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TypeVar

from attrs import frozen

from ..ir import Bucket, Op, Program, Stmt
from .naming import WIDTH, axes_word, call, exploded

_K = TypeVar("_K")

Line = tuple[str, str]
"""Code, and its comment."""


@frozen
class Around:
    """The lines before the call of a layer's module, and those after it."""

    before: tuple[Line, ...] = ()
    after: tuple[Line, ...] = ()


@frozen
class LayerCall:
    """The parts that a layer in a loop has of its own, by their Python names."""

    module: str
    draws: tuple[str, ...]
    recompute: str
    """The expression that says whether backward recomputes it, where it does not recompute all."""
    params: str = ""
    """Its group of flat parameters, "" where it has none."""
    inner: tuple[str, ...] = ()
    """The repeats inside the layers."""


def is_flat(program: Program, stmt: Stmt) -> bool:
    """Whether these lines do what a statement of a forward body does."""
    if not isinstance(stmt, Op):
        return False
    flat_params = {bucket.dim for bucket in program.buckets}
    return stmt.kind == "unpack" or bool(flat_params & {*stmt.outputs[0].type.dims})


def repeat_of(pattern: str) -> str:
    """The modules that the `*` of a parameter's name pattern run over, `layers` or
    `blocks.layers`.
    """
    return pattern.rpartition(".*")[0].replace(".*", "")


def group_name(repeat: str) -> str:
    """The variable with the groups of flat parameters of the layers of a repeat."""
    return f"{repeat.rpartition('.')[2]}_params"


def loop_line(item: str, modules: str, zipped: Mapping[str, str], indent: int) -> str:
    """The line that opens a loop over modules and what each layer has beside its module."""
    if not zipped:
        return f"for {item} in {modules}:"
    names = ", ".join([item, *zipped])
    fits = len(f"for {names} in zip(") + indent <= WIDTH
    head = f"for {names}" if fits else exploded("for ", [item, *zipped], indent)
    return f"{call(f'{head} in zip', [modules, *zipped.values(), 'strict=True'], indent)}:"


def around(program: Program, own: Sequence[Bucket], params: str, x: str) -> Around:
    """The lines for the group `params` of a layer, which has these buckets; `x` is what they
    pass on.
    """
    resharded = [bucket for bucket in own if bucket.reshard_after_forward]
    gathers = [
        (f"all_gather over {axes_word(b.shard_axes, program)}", b) for b in reversed(resharded)
    ]
    there = [f"{what}  {gathered(program, *of)}" for what, of in _each(gathers).items()]
    there += ["all_gather is complete"] * any(b.shard_axes and b not in resharded for b in own)
    backward = ", ".join([*(["freed"] if resharded else []), *_reductions(program, own)])
    function = "unshard" if there else "reduce_grads_in_backward"
    before = f"{x} = {function}({x}, {params})", "\n".join([*there, f"bwd: {backward}"])
    after = (f"{x} = reshard({x}, {params})", "freed  bwd: all_gather")
    return Around((before,), (after,) if resharded else ())


def _reductions(program: Program, own: Sequence[Bucket]) -> list[str]:
    """The reductions of a layer's gradients, with the elements of this rank's part."""
    when = {True: "", False: ", in the last microbatch"}
    sums = [
        (
            (
                f"{what} over {axes_word(axes, program)}",
                program.reduce_dtype(bucket),
                bucket.shard_gradients,
            ),
            bucket,
        )
        for bucket in own
        for what, axes in (
            ("reduce_scatter", bucket.shard_axes),
            ("all_reduce", bucket.reduce_axes),
        )
        if axes
    ]
    return [
        f"{what}  {_sum(_elements(program, each) for each in of)} × {dtype}{when[each_time]}"
        for (what, dtype, each_time), of in _each(sums).items()
    ]


def _each(pairs: Iterable[tuple[_K, Bucket]]) -> dict[_K, list[Bucket]]:
    found: dict[_K, list[Bucket]] = {}
    for key, bucket in pairs:
        found.setdefault(key, []).append(bucket)
    return found


def _elements(program: Program, bucket: Bucket) -> int:
    """The elements of this rank's part of one layer's gradient."""
    return program.elements(bucket.type) // prod(map(program.size, bucket.layers))


def _sum(sizes: Iterable[int]) -> str:
    texts = [f"{size:,}" for size in sizes]
    return f"({' + '.join(texts)})" if len(texts) > 1 else texts[0]


def gathered(program: Program, *of: Bucket) -> str:
    """The sizes of gathered buffers of a layer, all of one element type."""
    sizes = _sum(_elements(program, bucket) * program.degree(bucket.shard_axes) for bucket in of)
    return f"{sizes} × {working(program, *of)}"


def working(program: Program, *of: Bucket) -> str:
    """The element type of buckets' parameters as the model uses them, which is one."""
    names = {bucket.name for bucket in of}
    unpacks = (op for op in program.ops if op.kind == "unpack" and op.get("bucket") in names)
    (dtype,) = {value.type.dtype for op in unpacks for value in op.outputs}
    return dtype
