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
from .naming import WIDTH, axes_word, call, explode

_K = TypeVar("_K")

Line = tuple[str, str]
"""Code, and its comment."""


@frozen
class Around:
    """The lines before the call of a layer's module, and the lines after it."""

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
    """Whether lines of this module do what a statement of a forward body does."""
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
    head = f"for {names}" if fits else explode("for ", [item, *zipped], indent)
    return f"{call(f'{head} in zip', [modules, *zipped.values(), 'strict=True'], indent)}:"


def around(program: Program, buckets: Sequence[Bucket], params: str, x: str) -> Around:
    """The lines for the group `params` of a layer, which has these buckets; `x` is the value that
    they pass on.
    """
    resharded = [bucket for bucket in buckets if bucket.reshard_after_forward]
    comments = _gathers(program, resharded)
    if any(bucket.shard_axes and bucket not in resharded for bucket in buckets):
        comments.append("all_gather is complete")
    function = "unshard" if comments else "reduce_grads_in_backward"
    backward = _reductions(program, buckets)
    if resharded:
        backward.insert(0, "freed")
    comments.append(f"bwd: {', '.join(backward)}")
    before = f"{x} = {function}({x}, {params})", "\n".join(comments)
    if not resharded:
        return Around((before,))
    return Around((before,), ((f"{x} = reshard({x}, {params})", "freed  bwd: all_gather"),))


def _gathers(program: Program, resharded: Sequence[Bucket]) -> list[str]:
    """The gathers of a layer's parameters, one for each group of axes."""
    gathers = list[tuple[str, Bucket]]()
    for bucket in reversed(resharded):
        gathers.append((f"all_gather over {axes_word(bucket.shard_axes, program)}", bucket))
    comments = list[str]()
    for gather, buckets in _by_key(gathers).items():
        comments.append(f"{gather}  {gather_size(program, *buckets)}")
    return comments


def _reductions(program: Program, buckets: Sequence[Bucket]) -> list[str]:
    """The reductions of a layer's gradients, with the elements of this rank's part."""
    sums = list[tuple[tuple[str, str, bool], Bucket]]()
    for bucket in buckets:
        dtype, each_time = program.reduce_dtype(bucket), bucket.shard_gradients
        if bucket.shard_axes:
            scatter = f"reduce_scatter over {axes_word(bucket.shard_axes, program)}"
            sums.append(((scatter, dtype, each_time), bucket))
        if bucket.reduce_axes:
            reduction = f"all_reduce over {axes_word(bucket.reduce_axes, program)}"
            sums.append(((reduction, dtype, each_time), bucket))
    comments = list[str]()
    for (reduction, dtype, each_time), reduced in _by_key(sums).items():
        elements = _sum(_elements(program, bucket) for bucket in reduced)
        when = "" if each_time else ", in the last microbatch"
        comments.append(f"{reduction}  {elements} × {dtype}{when}")
    return comments


def _by_key(pairs: Iterable[tuple[_K, Bucket]]) -> dict[_K, list[Bucket]]:
    buckets: dict[_K, list[Bucket]] = {}
    for key, bucket in pairs:
        buckets.setdefault(key, []).append(bucket)
    return buckets


def _elements(program: Program, bucket: Bucket) -> int:
    """The elements of this rank's part of one layer's gradient."""
    return program.elements(bucket.type) // prod(map(program.size, bucket.layers))


def _sum(sizes: Iterable[int]) -> str:
    texts = [f"{size:,}" for size in sizes]
    return f"({' + '.join(texts)})" if len(texts) > 1 else texts[0]


def gather_size(program: Program, *buckets: Bucket) -> str:
    """The sizes of gathered buffers of a layer, all of one element type."""
    sizes = list[int]()
    for bucket in buckets:
        sizes.append(_elements(program, bucket) * program.degree(bucket.shard_axes))
    return f"{_sum(sizes)} × {working_dtype(program, *buckets)}"


def working_dtype(program: Program, *buckets: Bucket) -> str:
    """The one element type of buckets' parameters as the model uses them."""
    names = {bucket.name for bucket in buckets}
    dtypes = set[str]()
    for op in program.ops:
        if op.kind == "unpack" and op.get("bucket") in names:
            dtypes |= {value.type.dtype for value in op.outputs}
    (dtype,) = dtypes
    return dtype
