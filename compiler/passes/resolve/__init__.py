"""From a plan's text to a program without placements.

Purpose: what every name means; all sections read; dims, mesh and the claims of `shard` in order.
After: a single-device program that is well formed.  Non-goals: whether the sharding is possible (`validate`).
"""

from attrs import evolve

from ... import syntax
from ...diagnostics import Diagnostics, Note, did_you_mean, listing
from ...gpus import kernels_for
from ...ir import Axis, Claim, Dim, Program, Region
from ...settings import Cluster, Train, read
from ...source import Source
from .arithmetic import Scalar, evaluate, whole
from .branches import divide
from .compiled import check_compiled
from .document import Document, gather
from .inputs import check_data
from .logits import logits_for
from .model import build
from .parts import claims_of_parts, state_of_parts, train_of_parts
from .pipeline import pipelined
from .precision import element_types
from .state import check_patterns, flow, state_axes
from .stored import stored
from .user_ops import user_ops

SECTIONS = ("cluster", "mesh", "names", "pipeline", "shard", "state", "train")


def resolve(source: Source, over: Source | None = None) -> Program:
    """The program of a plan, with the sections of another text over its own as in a `use`.  Raises PlanError."""
    document = gather(source, over)
    found = Diagnostics()
    sections = _sections(document, found)
    train = read(Train, sections["train"], found)
    cluster = read(Cluster, sections["cluster"], found) if "cluster" in document.sections else Cluster()
    found.check()
    assert train, "resolve: settings that failed to read were not reported"
    assert cluster, "resolve: settings that failed to read were not reported"
    axes = _axes(sections["mesh"], found)
    rules = _rules(sections["shard"], found)
    found.check()
    dims, scope = _dims(document.model)
    dims |= _data_dims(train, rules, axes)
    _known(rules, dims, axes)
    sizes = {axis.name: axis.size for axis in axes}
    claims = tuple(claim for claim in _claims(rules) if sizes[claim.axis] > 1)  # one of size 1 shards nothing
    divided = divide(document.model, dims, scope)
    dims |= {part.name: part for parts in divided.dims.values() for part in parts}
    frame = Program(
        document.model.name.name,
        "resolve",
        axes,
        tuple(dims.values()),
        claims_of_parts(claims, divided.dims),
        (),
        Region("model", (), span=document.model.span),
        evolve(train_of_parts(train, divided.copies, divided.dims), kernels=kernels_for(train, cluster)),
        cluster,
        state=state_of_parts(state_axes(sections["state"], claims, sizes), divided.copies),
        flow=flow(sections["state"]),
    )
    ops = user_ops(document.ops, source)
    check_compiled(train)
    built = build(divided.model, frame, scope, ops, *element_types(train))
    program = evolve(frame, region=built.region, params=built.params)
    program = evolve(program, train=evolve(program.train, logits=logits_for(program)))
    laid = claims_of_parts(_claims(rules), divided.dims)
    program = pipelined(program, document.sections.get("pipeline"), laid)
    check_patterns(sections["state"], program)
    if "names" in document.sections:
        program = evolve(program, names=stored(document.sections["names"], program, divided.copies, scope))
    check_data(document.model, program)
    return program


def _sections(document: Document, found: Diagnostics) -> dict[str, syntax.Section]:
    for kind, section in document.sections.items():
        if kind not in SECTIONS:
            found.error(
                "E0406",
                f"there is no section `{kind}`",
                section.head,
                "unknown section",
                help=_IN_MODEL if kind in ("dims", "const") else f"sections are {listing(SECTIONS)}",
            )
    if "train" not in document.sections:
        help = "add `train { seq = …  global_batch = …  microbatch = …  steps = …  optimizer … { … }  data … { … } }`"
        found.error("E0402", "this plan has no section `train`", document.source.whole(), help=help)
        found.check()
    span = document.source.whole()
    empty = {kind: syntax.Section(syntax.Name(kind, span), None, (), span) for kind in SECTIONS}
    return empty | document.sections


def _axes(section: syntax.Section, found: Diagnostics) -> tuple[Axis, ...]:
    axes: dict[str, Axis] = {}
    for entry in section.entries:
        match entry:
            case syntax.Setting(key, syntax.Number(int() as size, "")) if 0 < size <= 2**20 and key.name not in axes:
                axes[key.name] = Axis(key.name, size, key.name, span=entry.span)
            case _:
                help = "write `mesh { dp = 2  tp = 4 }`, outermost axis first, each once, sizes from 1 to 2^20"
                found.error("E0501", "this is not an axis with its size", entry.span, help=help)
    return tuple(axes.values())


def _rules(section: syntax.Section, found: Diagnostics) -> tuple[syntax.Rule, ...]:
    for entry in section.entries:
        if not isinstance(entry, syntax.Rule):
            found.error("E0502", "this is not a rule", entry.span, help="write `heads, ffn over tp`")
    return tuple(entry for entry in section.entries if isinstance(entry, syntax.Rule))


def _dims(model: syntax.Model) -> tuple[dict[str, Dim], dict[str, Scalar]]:
    """The model's own dims, and the scope of dims and constants for arithmetic."""
    dims: dict[str, Dim] = {}
    scope: dict[str, Scalar] = {}
    for section in model.body:
        if isinstance(section, syntax.Section):
            for entry in section.entries:
                _define(section, entry, dims, scope)
    return dims, scope


_IN_MODEL = "a model has `dims { … }` and `const { … }`; `repeat layers { … }` repeats its statements"


def _define(section: syntax.Section, entry: syntax.Entry, dims: dict[str, Dim], scope: dict[str, Scalar]) -> None:
    found = Diagnostics()
    match section.kind.name, entry:
        case "dims", syntax.Setting(syntax.Name("batch" | "seq" | "microbatches") as key):
            help = "it comes from `train { seq = …  global_batch = …  microbatch = … }`"
            found.error("E0309", f"dim `{key}` is not the model's to set", key.span, help=help)
        case (("dims" | "const"), syntax.Setting(key)) if key.name in scope:
            found.error("E0403", f"`{key}` is set twice", key.span, "again")
        case "dims", syntax.Setting(key, value):
            size = scope[key.name] = whole(key, evaluate(value, scope), value, scope)
            dims[key.name] = Dim(key.name, _padded(size, entry), size, span=entry.span)
        case "const", syntax.Setting(key, value):
            scope[key.name] = evaluate(value, scope)
        case (("dims" | "const"), _):
            found.error("E0406", f"`{section.kind}` has settings only", entry.span, help="write `hidden = 4096`")
        case _:
            found.error("E0406", f"a model has no section `{section.kind}`", section.head, help=_IN_MODEL)
    found.check()


def _padded(size: int, entry: syntax.Setting) -> int:
    """The size of a dim with its padding: the next multiple of the number behind `pad`."""
    if entry.pad is None:
        return size
    by = whole(entry.key, evaluate(entry.pad, {}), entry.pad, {})
    return -(-size // by) * by


def _data_dims(train: Train, rules: tuple[syntax.Rule, ...], axes: tuple[Axis, ...]) -> dict[str, Dim]:
    """Sequence, the batch of one microbatch over all ranks, and the number of microbatches in a step."""
    sizes = {axis.name: axis.size for axis in axes}
    batch = train.microbatch
    for rule in rules:
        if "batch" in map(str, rule.dims):
            for axis in rule.axes:
                batch *= sizes.get(axis.name, 1)
    found = Diagnostics()
    if train.global_batch % batch:
        ranks = batch // train.microbatch
        found.error(
            "E0310",
            "`global_batch` is not a whole number of microbatches",
            train.spans["global_batch"],
            f"{train.global_batch} / ({train.microbatch} sequences × {ranks} data-parallel ranks) is not whole",
            notes=[Note(train.spans["microbatch"], "sequences of a microbatch on each rank")],
            help=f"multiples of {batch} are, for instance {-(-train.global_batch // batch) * batch}",
        )
    found.check()
    given = {
        "seq": (train.seq, "seq"),
        "batch": (batch, "microbatch"),
        "microbatches": (train.global_batch // batch, "global_batch"),
    }
    return {name: Dim(name, size, span=train.spans[key]) for name, (size, key) in given.items()}


def _known(rules: tuple[syntax.Rule, ...], dims: dict[str, Dim], axes: tuple[Axis, ...]) -> None:
    """Every rule speaks of dims and axes that there are."""
    found = Diagnostics()
    names = [axis.name for axis in axes]
    for rule in rules:
        for dim in rule.dims:
            if dim.name not in dims:
                help = did_you_mean(dim.name, dims) or f"dims are {listing(dims)}"
                found.error("E0503", f"there is no dim `{dim}`", dim.span, help=help)
        for axis in rule.axes:
            if axis.name not in names:
                help = did_you_mean(axis.name, names) or f"axes of `mesh` are {listing(names)}"
                found.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)
    found.check()


def _claims(rules: tuple[syntax.Rule, ...]) -> tuple[Claim, ...]:
    """One claim for each dim and axis."""
    return tuple(
        Claim(rank, dim.name, axis.name, True, span=dim.span)
        for rank, rule in enumerate(rules)
        for dim in rule.dims
        for axis in rule.axes
    )
