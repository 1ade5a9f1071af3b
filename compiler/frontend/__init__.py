"""From a plan's text to a program without placements."""

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from ..config.settings import Train
from ..ir import (
    BATCH,
    DATA_DIMS,
    MICROBATCHES,
    SEQUENCE,
    Axis,
    Claim,
    Dim,
    Program,
    Region,
    StateAxes,
)
from ..ops.routers import with_padding
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing, wrong
from ..syntax.limits import Reader, load
from ..syntax.source import Source
from ..syntax.synonyms import help_for_section
from .arithmetic import Scalar, evaluate, whole
from .branch_names import find_param_uses
from .elastic import check_ranges, check_rows, with_initial_sizes
from .hf_weights import get_stored_weights
from .inputs import check_data
from .load_plan import Document, gather
from .loss_chunking import logits_for
from .model import build
from .pipeline import with_pipeline
from .route_dims import route_dims
from .sections import Sections, element_types, get_settings, stand_in_train
from .sharding import (
    axes_of,
    check_how,
    check_patterns,
    claims_of,
    rules_of,
    state_axes,
    without_unknown_names,
)
from .split_branches import Divided, claims_of_parts, divide, state_of_parts, train_of_parts
from .user_ops import user_ops
from .validate import validate

SECTIONS = ("cluster", "mesh", "names", "pipeline", "shard", "state", "train", "watch")


@frozen
class Resolved:
    """A plan's program, as far as its mistakes leave one, and the mistakes."""

    program: Program
    mistakes: Diagnostics


def resolve(source: Source, over: Source | None = None, read: Reader = load) -> Program:
    """The program of a plan, with the sections of another text over its own as in a `use`; `read`
    opens what it uses.

    Raises PlanError with all mistakes that can be found in a plan that is not lowered.
    """
    resolved = resolve_sound_parts(source, over, read)
    if resolved.mistakes:
        with resolved.mistakes.catch():
            validate(resolved.program, resolved.mistakes)
    resolved.mistakes.check()
    return resolved.program


def resolve_sound_parts(
    source: Source, over: Source | None = None, read: Reader = load
) -> Resolved:
    """The program of a plan's sound parts, for who looks for further mistakes in it.

    Raises PlanError where the mistakes leave no program.
    """
    diagnostics = Diagnostics()
    document = gather(source, diagnostics, over, read)
    sections = _sections(document, diagnostics)
    settings = get_settings(document.sections, sections, diagnostics)
    program = None
    with diagnostics.catch():
        program = _program(document, sections, settings, diagnostics)
        if settings.train:
            check_data(document.model, program, diagnostics)
            program = evolve(program, train=evolve(program.train, logits=logits_for(program)))
    if not program:
        diagnostics.check()
        raise AssertionError("resolve: a program that was not made has no mistake")
    return Resolved(program, diagnostics)


def _program(
    document: Document,
    sections: Mapping[str, tree.Section],
    settings: Sections,
    diagnostics: Diagnostics,
) -> Program:
    """The program but for what depends on its data, as far as mistakes, which are added to
    `diagnostics`, leave one.
    """
    rules = rules_of(sections["shard"], diagnostics)
    axes = axes_of(sections["mesh"], rules, diagnostics)
    train = settings.train or stand_in_train(sections["train"], axes)
    if not settings.train:
        diagnostics.doubt(section="train")
    dims, scope = _dims(document.model, diagnostics)
    axes = with_initial_sizes(axes, rules, train, diagnostics)
    dims |= _data_dims(train, rules, axes, diagnostics)
    rules = without_unknown_names(rules, dims, axes, diagnostics)
    check_how(rules, diagnostics)
    check_ranges(axes, rules, diagnostics)
    sizes = {axis.name: axis.size for axis in axes}
    all_claims = claims_of(rules)
    claims = _claims_of_several_ranks(all_claims, axes, diagnostics)
    ops = user_ops(document.ops, document.source, diagnostics)
    divided = divide(document.model, dims, scope, diagnostics)
    for parts in divided.dims.values():
        dims |= {part.name: part for part in parts}
    dims |= route_dims(divided.model, dims, scope, diagnostics)
    state = state_axes(sections["state"], claims, sizes, diagnostics)
    frame = _frame(document, axes, dims, claims, train, state, settings, divided)
    before = diagnostics.count
    built = build(divided.model, frame, scope, ops, *element_types(train), diagnostics)
    program = evolve(frame, region=built.region, params=built.params, buffers=built.buffers)
    if diagnostics.count == before:
        program = with_padding(program)
    head, part_claims = sections["pipeline"].head, claims_of_parts(all_claims, divided.dims)
    program = with_pipeline(program, settings.pipeline, head, part_claims, diagnostics)
    check_patterns(sections["state"], program, diagnostics)
    check_rows(program, diagnostics)
    if "names" in document.sections and diagnostics.count == before:
        names = get_stored_weights(document.sections["names"], program, divided.copies, scope)
        program = evolve(program, names=names)
    return program


def _claims_of_several_ranks(
    claims: Sequence[Claim], axes: Sequence[Axis], diagnostics: Diagnostics
) -> tuple[Claim, ...]:
    """The claims over axes that may have several ranks: others shard nothing."""
    several: set[str] = set()
    for axis in axes:
        if axis.size > 1 or axis.within or axis.name in diagnostics.doubtful:
            several.add(axis.name)
    return tuple(claim for claim in claims if claim.axis in several)


def _frame(
    document: Document,
    axes: tuple[Axis, ...],
    dims: Mapping[str, Dim],
    claims: Sequence[Claim],
    train: Train,
    state: Sequence[StateAxes],
    settings: Sections,
    divided: Divided,
) -> Program:
    """The program without its ops and parameters; claims, settings and state hold for all parts of
    what is `divided`.
    """
    return Program(
        document.model.name.name,
        "resolve",
        axes,
        tuple(dims.values()),
        claims_of_parts(claims, divided.dims),
        (),
        Region("model", (), span=document.model.span),
        train_of_parts(train, divided.copies, divided.dims),
        settings.cluster,
        state=state_of_parts(state, divided.copies),
        flow=settings.flow,
        watch=settings.watch,
        sees=document.model.sees,
    )


def _sections(document: Document, diagnostics: Diagnostics) -> dict[str, tree.Section]:
    for kind, section in document.sections.items():
        if kind not in SECTIONS:
            diagnostics.error(
                "E0406",
                f"there is no section `{kind}`",
                section.head,
                "unknown section",
                help=_help_for_section(kind),
            )
    if "train" not in document.sections:
        help = (
            "add `train { seq = …  global_batch = …  microbatch = …  steps = …  optimizer … {"
            " … }  data … { … } }`"
        )
        diagnostics.error(
            "E0402", "this plan has no section `train`", document.source.whole(), help=help
        )
    span = document.source.whole()
    empty = {kind: tree.Section(tree.Name(kind, span), None, (), span) for kind in SECTIONS}
    return empty | document.sections


def _help_for_section(kind: str) -> str:
    if kind in ("dims", "const"):
        return _IN_MODEL
    return (
        help_for_section(kind)
        or did_you_mean(kind, SECTIONS)
        or f"sections are {listing(SECTIONS)}"
    )


def _dims(model: tree.Model, diagnostics: Diagnostics) -> tuple[dict[str, Dim], dict[str, Scalar]]:
    """The model's own dims, and the scope of dims and constants for arithmetic.

    Dims whose size is not known have one that all axes divide, and are not in the scope.
    """
    dims: dict[str, Dim] = {}
    scope: dict[str, Scalar] = {}
    for section in model.body:
        if isinstance(section, tree.Section):
            for entry in section.entries:
                with diagnostics.catch():
                    _define(section, entry, dims, scope, diagnostics)
                    continue
                _doubt_entry(section, entry, dims, diagnostics)
    if "dims" in diagnostics.in_part:
        for use in find_param_uses(model.body):
            for dim in (*use.outs, *use.ins):
                if dim.name in diagnostics.doubtful - scope.keys():
                    dims.setdefault(dim.name, Dim(dim.name, UNKNOWN_SIZE, span=dim.span))
    return dims, scope


def _doubt_entry(
    section: tree.Section, entry: tree.Entry, dims: dict[str, Dim], diagnostics: Diagnostics
) -> None:
    """Puts in doubt what an entry with a mistake defines; a dim is of unknown size."""
    if section.kind.name not in ("dims", "const"):
        diagnostics.doubt(*section.span.names, section="statements")
    elif isinstance(entry, tree.Setting):
        name = entry.key.name
        diagnostics.doubt(name)
        if section.kind.name == "dims":
            dims.setdefault(name, Dim(name, UNKNOWN_SIZE, span=entry.span))


UNKNOWN_SIZE = 2**40 * 3 * 5 * 7
"""Stands in for the size of a dim that cannot be known."""

_IN_MODEL = (
    "a model has `dims { … }` and `const { … }`; `repeat layers { … }` repeats its statements"
)


def _define(
    section: tree.Section,
    entry: tree.Entry,
    dims: dict[str, Dim],
    scope: dict[str, Scalar],
    diagnostics: Diagnostics,
) -> None:
    """Adds a dim or a constant.  Raises PlanError."""
    match section.kind.name, entry:
        case "dims", tree.Setting(key) if key.name in (*DATA_DIMS, MICROBATCHES):
            help = "it comes from `train { seq = …  global_batch = …  microbatch = … }`"
            raise wrong("E0309", f"dim `{key}` cannot be set in the model", key.span, help=help)
        case (("dims" | "const"), tree.Setting(key)) if key.name in scope:
            raise wrong("E0403", f"`{key}` is set twice", key.span, "repeated")
        case "dims", tree.Setting(key, value):
            size = whole(key, evaluate(value, scope), value, scope)
            dims[key.name] = Dim(key.name, _size_with_padding(size, entry), size, span=entry.span)
            scope[key.name] = size
            diagnostics.doubtful.discard(key.name)  # whatever else is not read
        case "const", tree.Setting(key, value):
            scope[key.name] = evaluate(value, scope)
        case (("dims" | "const"), _):
            help = "write `hidden = 4096`"
            raise wrong("E0406", f"`{section.kind}` has settings only", entry.span, help=help)
        case _:
            raise wrong(
                "E0406", f"a model has no section `{section.kind}`", section.head, help=_IN_MODEL
            )


def _size_with_padding(size: int, entry: tree.Setting) -> int:
    """The size of a dim with its padding: the next multiple of the number after `pad`."""
    if entry.pad is None:
        return size
    by = whole(entry.key, evaluate(entry.pad, {}), entry.pad, {})
    return -(-size // by) * by


def _data_dims(
    train: Train, rules: Sequence[tree.Rule], axes: Sequence[Axis], diagnostics: Diagnostics
) -> dict[str, Dim]:
    """Sequence, the batch of one microbatch over all ranks, and the number of microbatches in a
    step.
    """
    sizes = {axis.name: axis.size for axis in axes}
    batch = train.microbatch
    for rule in rules:
        if BATCH in map(str, rule.dims):
            for axis in rule.axes:
                batch *= sizes.get(axis.name, 1)
    if train.global_batch % batch:
        ranks = batch // train.microbatch
        diagnostics.error(
            "E0310",
            "`global_batch` is not a whole number of microbatches",
            train.spans["global_batch"],
            f"{train.global_batch} / ({train.microbatch} sequences × {ranks} data-parallel"
            " ranks) is not whole",
            notes=[Note(train.spans["microbatch"], "sequences of a microbatch on each rank")],
            help=f"multiples of {batch} are, for instance"
            f" {-(-train.global_batch // batch) * batch}",
        )
    spans, microbatches = train.spans, -(-train.global_batch // batch)
    dims = (
        Dim(SEQUENCE, train.seq, span=spans["seq"]),
        Dim(BATCH, batch, span=spans["microbatch"]),
        Dim(MICROBATCHES, microbatches, span=spans["global_batch"]),
    )
    return {dim.name: dim for dim in dims}
