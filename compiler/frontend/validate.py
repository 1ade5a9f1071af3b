"""Says what is wrong with a plan's sharding before anything is built on it, with the arithmetic.

Before: `resolve`.  After: every claim names a dim and an axis, and the axis divides the dim, or the
dim counts few key/value heads, and the axis can be factored for them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod

from ..analysis.context_parallel import ULYSSES, attention_heads, heads_left
from ..analysis.recompute import check as check_recomputed
from ..analysis.vocabulary import tables
from ..config.settings import ON, PADDED
from ..config.units import count_words
from ..ir import DATA_DIMS, Axis, Claim, Dim, Op, Param, Program, sources_of
from ..ops import OPS, roles
from ..ops.routers import TOP
from ..syntax.diagnostics import Diagnostics, Note, listing
from .attributes import check_ranges
from .causality import check_causality
from .sharding import check_groups


def validate(program: Program, mistakes: Diagnostics | None = None) -> Program:
    """The program, unchanged.

    Raises PlanError with all mistakes, unless `mistakes` are given, which are known already: then
    further ones are added to them, and the program may lack parts.
    """
    diagnostics = Diagnostics() if mistakes is None else mistakes
    for check in CHECKS:
        check(program, diagnostics)
    if mistakes is None:
        diagnostics.check()
    else:  # otherwise a pass checks recomputation, in a program whose ops are split
        with diagnostics.catch():
            check_recomputed(program)
    return program


def _check_idle(program: Program, diagnostics: Diagnostics) -> None:
    """Everything that is computed, and every parameter, has a part in the loss."""
    results = [end.name for end in program.region.yields]
    for name in program.types:
        # a statement with a mistake may have used the value
        if name.partition(".")[0] in diagnostics.used:
            results.append(name)
    needed = sources_of(program.region, results)
    idle: list[Op] = []
    for op in program.ops:
        if op.kind != "leaf" and needed.isdisjoint(value.name for value in op.outputs):
            idle.append(op)
    for op in _last_ops(idle):
        diagnostics.error(
            "E0212",
            "the loss does not depend on this",
            op.span,
            "nothing comes of it",
            help="leave it out",
        )
    if idle:  # parameters of idle ops are no mistakes of their own
        return
    for param in program.params:
        if param.name not in needed:
            diagnostics.error(
                "E0212",
                f"the loss does not depend on parameter `{param.name}`",
                param.span,
                help="leave it out",
            )


def _last_ops(ops: Sequence[Op]) -> Sequence[Op]:
    """The ops whose results no other of them reads; the first op if there is none."""
    inputs: set[str] = set()
    for op in ops:
        inputs.update(op.inputs)
    last: list[Op] = []
    for op in ops:
        if inputs.isdisjoint(value.name for value in op.outputs):
            last.append(op)
    return last or ops[:1]


def _check_compiled(program: Program, diagnostics: Diagnostics) -> None:
    """torch.compile makes no graph of a layer that sends as many rows as tokens chose."""
    routed = next((op for op in program.ops if op.kind == TOP.name), None)
    if routed and program.train.compile == ON:
        notes = [Note(program.train.spans["compile"], "layers are compiled")]
        padded = program.train.experts == PADDED
        what = "which tokens an expert gets" if padded else "how many rows an expert gets"
        message = f"{what} is not known to a compiled layer"
        diagnostics.error("E0412", message, routed.span, notes=notes, help="leave `compile` out")


def _check_axis_order(program: Program, diagnostics: Diagnostics) -> None:
    """Several axes of one dim go in the mesh's order, outer first, and no axis twice."""
    order = [axis.name for axis in program.axes]
    for dim in dict.fromkeys(claim.dim for claim in program.claims):
        claims = [claim for claim in program.claims if claim.dim == dim]
        places = [order.index(claim.axis) for claim in claims]
        in_order = sorted(set(places))
        if places != in_order:
            axes = ", ".join(order[place] for place in in_order)
            help = f"write `{dim} over {axes}`: several axes go outer first, in the order of `mesh`"
            diagnostics.error(
                "E0507",
                f"the axes of `{dim}` are out of order, or one is named twice",
                claims[-1].span,
                help=help,
            )


def _check_unused(program: Program, diagnostics: Diagnostics) -> None:
    """Every claim shards something, and every axis is used."""
    used: set[str] = set()
    for type in program.types.values():
        used.update(type.dims)
    for claim in program.claims:
        if claim.dim not in used:
            diagnostics.error(
                "E0508",
                f"nothing is sharded by `{claim.dim} over {claim.axis}`",
                claim.span,
                "matches nothing",
            )
            if claim.dim not in diagnostics.used:
                diagnostics.doubt(claim.dim)
    for axis in _idle_axes(program):
        help = (
            f"shard a dim over it, or leave it out of `mesh`: all ranks of `{axis.name}` would"
            " do the same work"
        )
        diagnostics.error(
            "E0509", f"nothing uses axis `{axis.name}` of size {axis.size}", axis.span, help=help
        )


def _idle_axes(program: Program) -> list[Axis]:
    """The axes over which nothing is sharded."""
    claimed = {claim.axis for claim in program.claims}
    if program.pipeline:
        claimed.add(program.pipeline.axis)
    return [axis for axis in program.axes if axis.size > 1 and axis.name not in claimed]


Clash = tuple[Param, Claim, Claim]
"""A parameter with two dims over one axis, the first that is claimed first."""


def _check_weights(program: Program, diagnostics: Diagnostics) -> None:
    """No rule shards two dims of one parameter over one axis; a dim that is one too many is one
    mistake.
    """
    clashes: list[Clash] = []
    for param in program.params:
        if param.name not in diagnostics.doubtful:
            clashes += _clashes(param, program.claims)
    while clashes:
        times: Counter[Claim] = Counter()
        for _, first, second in clashes:
            times.update((first, second))
        worst = max(times, key=lambda claim: (times[claim], program.claims.index(claim)))
        _report_clash(worst, [clash for clash in clashes if worst in clash], diagnostics)
        clashes = [clash for clash in clashes if worst not in clash]


def _clashes(param: Param, claims: Sequence[Claim]) -> Iterator[Clash]:
    """The pairs of claims that shard two dims of a parameter over one axis; not dims of data."""
    of_param = [claim for claim in claims if claim.dim in param.type.dims]
    for first, second in combinations(of_param, 2):
        dims = {first.dim, second.dim}
        if first.axis == second.axis and len(dims) == 2 and dims.isdisjoint(DATA_DIMS):
            yield param, first, second


def _report_clash(claim: Claim, clashes: Sequence[Clash], diagnostics: Diagnostics) -> None:
    param, first, second = clashes[0]
    if len(clashes) == 1:
        message = (
            f"`{first.dim}` and `{second.dim}` of parameter `{param.name}` are both over"
            f" `{claim.axis}`"
        )
        label = "sharded twice" if first.span != second.span else "both claimed here"
        notes = [Note(param.span, "of this parameter")]
    else:
        message = (
            f"`{claim.dim}` and another dim of {len(clashes)} parameters are both over"
            f" `{claim.axis}`"
        )
        label = "claimed here"
        notes: list[Note] = []
        for param, first, second in clashes:
            other = second if claim == first else first
            notes.append(Note(param.span, f"`{other.dim}` is over `{claim.axis}` too"))
    help = "shard one of them, or put them over different axes"
    diagnostics.error("E0505", message, claim.span, label, notes=notes, help=help)


def _check_divisible(program: Program, diagnostics: Diagnostics) -> None:
    """Every axis divides its dims, and padding is legal."""
    kv_heads = {roles(op, program.types).kv_heads for op in program.ops}
    broken = set[str]()
    for dim in dict.fromkeys(claim.dim for claim in program.claims):
        claims = [claim for claim in program.claims if claim.dim == dim]
        axes = tuple(dict.fromkeys(claim.axis for claim in claims))
        size, degree = program.size(dim), program.degree(axes)
        degree *= 2 ** sum(claim.zigzag for claim in claims)
        # an axis may be larger than the number of key/value heads
        may_be_factored = dim in kv_heads and len(axes) == 1
        if size % degree == 0 or (may_be_factored and degree % size == 0):
            continue
        broken.add(dim)
        _report_indivisible(program, claims, axes, degree, diagnostics)
    _check_head_exchange(program, diagnostics)
    _check_padding(program, broken, diagnostics)


def _report_indivisible(
    program: Program,
    claims: Sequence[Claim],
    axes: tuple[str, ...],
    degree: int,
    diagnostics: Diagnostics,
) -> None:
    """Adds the mistake that the axes of these claims do not divide their dim.

    `degree` is the number of parts that the dim would have.
    """
    dim = claims[0].dim
    size = program.size(dim)
    if size > degree:
        label = f"{size} / {degree} is not whole"
    else:
        label = f"{size} is smaller than {degree}"
    help = f"make `{dim}` a multiple of {degree}, or the axis a divisor of {size}"
    if dim in tables(program).values():
        help += f"; a vocabulary can be padded: `{dim} = {size} pad {degree}`"
    notes = [
        Note(program.dim(dim).span, "its size"),
        Note(program.axis(axes[-1]).span, "the axis"),
    ]
    chunked_axes = [claim.axis for claim in claims if claim.zigzag]
    chunks = ""
    if chunked_axes:
        chunks = " in 2 chunks a rank"
        if len(axes) > 1:
            chunks += f" of `{chunked_axes[0]}`"
    message = f"`{dim}` cannot be split over `{' × '.join(axes)}`{chunks}"
    diagnostics.error("E0510", message, claims[-1].span, label, notes=notes, help=help)


def _check_head_exchange(program: Program, diagnostics: Diagnostics) -> None:
    """Where attention exchanges the sequence for heads, these are divided once more."""
    for claim in program.claims:
        if claim.via != ULYSSES:
            continue
        heads: dict[str, None] = {}
        for op in program.ops:
            heads |= dict.fromkeys(attention_heads(program, op))
        for dim in heads:
            _check_exchanged(program, claim, dim, diagnostics)


def _check_exchanged(program: Program, claim: Claim, dim: str, diagnostics: Diagnostics) -> None:
    """The heads `dim` that a rank has are divided by the axis of `claim`."""
    ranks, heads = program.axis(claim.axis).size, heads_left(program, dim)
    are_kv_heads = any(roles(op, program.types).kv_heads == dim for op in program.ops)
    if heads % ranks == 0 or (are_kv_heads and ranks % heads == 0):
        return
    parts = program.size(dim) // heads * ranks
    label = f"{program.size(dim)} / {parts} is not whole"
    message = f"`{dim}` cannot be split over `{claim.axis}` within attention"
    notes = [
        Note(program.dim(dim).span, "its size"),
        Note(program.axis(claim.axis).span, "the axis"),
    ]
    help = f"make `{dim}` a multiple of {parts}, or write `via gather` or `via ring`"
    diagnostics.error("E0510", message, claim.span, label, notes=notes, help=help)


def _check_padding(program: Program, broken: set[str], diagnostics: Diagnostics) -> None:
    """Padding counts for nothing: nothing but the loss sums or normalises over it, and each rank
    holds more than it.

    Dims that are `broken` cannot be split, whatever their padding.
    """
    padded: dict[str, Dim] = {}
    for dim in program.dims:
        if dim.valid < dim.size and dim.name not in broken:
            padded[dim.name] = dim
    for op in program.ops:
        unsharded = OPS[op.kind].unsharded_dims(program.operands(op), op)
        over = {*op.names("over"), *unsharded} - {roles(op, program.types).classes}
        for name in over & padded.keys():
            help = "only the vocabulary of tables and of the loss can be padded"
            diagnostics.error(
                "E0314", f"`{op.kind}` works over `{name}`, which has padding", op.span, help=help
            )
    for name, dim in padded.items():
        ranks = _degree(program, name)
        if dim.size - dim.valid >= dim.size // ranks:
            message = f"a rank would have only padding of `{name}`"
            label = f"{dim.valid} of {dim.size} over {ranks} ranks"
            diagnostics.error("E0314", message, dim.span, label)


def _check_machines(program: Program, diagnostics: Diagnostics) -> None:
    """The mesh has as many ranks as the cluster has GPUs."""
    cluster, ranks, gpus = program.cluster, program.ranks, _gpus_per_node(program)
    if cluster.nodes * gpus == ranks:
        _check_within_node(program, diagnostics)
        return
    # ranks of an axis that nothing uses are a mistake of their own
    if cluster.nodes * gpus == ranks // prod(axis.size for axis in _idle_axes(program)):
        return
    nodes = count_words(cluster.nodes, "node")
    if cluster.gpus_per_node:
        nodes += f" of {count_words(gpus, 'GPU')}"
    if cluster.gpus_per_node is None:
        label = f"{ranks} / {cluster.nodes} is not whole"
    else:
        label = count_words(cluster.nodes * gpus, "GPU")
    diagnostics.error(
        "E0512",
        f"the mesh has {count_words(ranks, 'rank')}, the cluster {nodes}",
        cluster.spans.get("nodes", program.region.span),
        label,
        help="the product of the mesh's axes is the number of GPUs",
    )


def _check_within_node(program: Program, diagnostics: Diagnostics) -> None:
    """Axes over which weights lie communicate inside every layer: they stay within one machine, if
    it can hold them.

    Unless the plan says `weights_across_nodes = on`.
    """
    if program.cluster.weights_across_nodes == ON:
        return
    gpus, idle = _gpus_per_node(program), _idle_axes(program)
    order = [axis.name for axis in program.axes if axis not in idle]
    weights = _claims_of_weights(program, gpus, diagnostics)
    for axis, claim in weights.items():
        inner = order[order.index(axis) :]
        span = program.degree(tuple(inner))
        if span > gpus:
            inner_weights = tuple(name for name in inner if name in weights)
            others = [name for name in inner if name not in weights]
            diagnostics.error(
                "E0511",
                f"axis `{axis}` spans several nodes: {count_words(span, 'rank')}, but"
                f" {count_words(gpus, 'GPU')} per node",
                claim.span,
                "communicates in every layer",
                help=_help_within_node(inner_weights, others, program, gpus),
            )


def _claims_of_weights(program: Program, gpus: int, diagnostics: Diagnostics) -> dict[str, Claim]:
    """By axis, the first claim that shards weights over it, the last axis first.

    Experts that are split over more GPUs than a node has are left out.
    """
    spread = {dim for dim in program.choices if _degree(program, dim) > gpus}
    if "route" in diagnostics.used and not program.choices:
        spread |= diagnostics.used  # which may be dims of experts
    weights: dict[str, Claim] = {}
    for claim in reversed(program.claims):
        if claim.dim not in DATA_DIMS and claim.dim not in spread:
            weights[claim.axis] = claim
    return weights


def _degree(program: Program, dim: str) -> int:
    """Over how many ranks a dim is split."""
    claims = [claim for claim in program.claims if claim.dim == dim and claim.split]
    return program.degree(tuple(claim.axis for claim in claims))


def _help_within_node(
    weights: tuple[str, ...], others: Sequence[str], program: Program, gpus: int
) -> str:
    """How axes of weights, and the other axes inside of the first of them, get into one machine."""
    listed = listing(weights)
    if program.degree(weights) > gpus:
        together = ", together" * (len(weights) > 1)
        help = f"make {listed} smaller{together}: a node has {count_words(gpus, 'GPU')}"
    else:
        smaller = listing((*weights, *others))
        help = f"write {listed} after {listing(others)} in `mesh`, or make {smaller} smaller"
    return (
        f"{help}; if slow links in every layer are meant, write `weights_across_nodes = on` in"
        " `cluster`"
    )


def _gpus_per_node(program: Program) -> int:
    """As the plan says, or an equal part of the ranks."""
    return program.cluster.gpus_per_node or program.ranks // program.cluster.nodes


def _check_groups(program: Program, diagnostics: Diagnostics) -> None:
    """Checks that groups of the optimizer name parameters, each in one group."""
    groups = ((group.params, group.spans["params"]) for group in program.train.optimizer.groups)
    check_groups(groups, [param.name for param in program.params], diagnostics)


def _check_heads(program: Program, diagnostics: Diagnostics) -> None:
    """Each key/value head serves as many query heads."""
    for op in program.ops:
        op_roles = roles(op, program.types)
        if op_roles.heads and program.size(op_roles.heads) % program.size(op_roles.kv_heads):
            label = (
                f"{program.size(op_roles.heads)} / {program.size(op_roles.kv_heads)} is not whole"
            )
            diagnostics.error(
                "E0311", f"`{op_roles.kv_heads}` does not divide `{op_roles.heads}`", op.span, label
            )


def _check_constants(program: Program, diagnostics: Diagnostics) -> None:
    """Each constant that an op is given is in its range, and rotation takes pairs."""
    for op in program.ops:
        check_ranges(OPS[op.kind], op, diagnostics)
        if last := roles(op, program.types).rotated:
            _check_rope(program, op, last, diagnostics)


def _number(op: Op, name: str) -> float:
    value = OPS[op.kind].get(op, name)
    assert isinstance(value, float), f"{op.kind}: {name} is no number"
    return value


def _check_rope(program: Program, op: Op, last: str, diagnostics: Diagnostics) -> None:
    dims, size, scaling = _number(op, "dims"), program.size(last), OPS["rope"].get(op, "scaling")
    if size % 2 and not dims:
        help = f"make it even, or rotate fewer dims with `dims={size - 1}`"
        diagnostics.error(
            "E0312", f"rope rotates pairs, but `{last}` = {size} is odd", op.span, help=help
        )
    if dims and not (dims % 2 == 0 and 0 < dims < size):
        help = f"an even number below {size}, or leave `dims` out, which rotates all of `{last}`"
        diagnostics.error(
            "E0312", f"rope cannot rotate {dims:g} of `{last}` = {size}", op.span, help=help
        )
    if scaling == "none" and _number(op, "factor") != 1:
        help = "add `scaling=linear`, `scaling=llama3` or `scaling=yarn`"
        diagnostics.error("E0313", "rope has a factor and no scaling", op.span, help=help)
    low, high = _number(op, "low"), _number(op, "high")
    if scaling in ("llama3", "yarn") and low >= high:
        help = (
            "`low` is below `high`: wavelengths between original / high and original / low are"
            " scaled in part"
        )
        diagnostics.error(
            "E0313", f"rope's `low` is {low:g}, but its `high` is {high:g}", op.span, help=help
        )


CHECKS = (
    _check_idle,
    _check_axis_order,
    _check_unused,
    _check_weights,
    _check_divisible,
    _check_machines,
    _check_groups,
    _check_heads,
    _check_compiled,
    _check_constants,
    check_causality,
)
"""Each adds the mistakes that it finds in a program."""
