"""`plan.json`: the resolved plan, what a step communicates and holds, and what was shown about the
program.

Non-goals: anything that the program needs in order to run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import PurePath
from typing import Any, cast

from attrs import NOTHING, Attribute, asdict, evolve

from .. import __version__
from ..analysis.certificate import KEPT, Proof, Tried, certificate
from ..analysis.collective import Collective
from ..analysis.communication import active_count, collectives, evaluation, parameter_count, places
from ..analysis.compared import Compared, compared
from ..analysis.elastic import every_size
from ..analysis.expert_loads import Load
from ..analysis.memory import Account, account, at_loads, capacity, fits, need_range
from ..analysis.time import expected
from ..config.settings import AUTO, Watch
from ..ir import Pipeline, Program
from ..ir.printer import how_claimed, print_ir
from ..ir.stages import stages
from ..syntax.source import Source
from .naming import file_word, run_word

SCHEMA = 2
"""The version of the file's schema, plan.schema.json: it rises when a field goes or changes its
meaning.
"""

TORCH_ALONE = "dtensor"
"""The target of programs of torch alone."""


def plan_json(
    program: Program,
    source: Source,
    model: Program,
    proof: Proof | None,
    matched: int,
    modules: Mapping[str, str],
    torch_alone: Mapping[str, str] | None = None,
    tried: Sequence[Tried] = (),
) -> str:
    """The text; `matched` is the number of ops that `readback` matched, `model` the plan before any
    placement.

    `modules` are the files of user ops, `torch_alone` those of a program of torch alone, name →
    text; `tried` are the functions of user ops that were tried.
    """
    hashes = {name: digest(text) for name, text in modules.items()}
    smaller = every_size(program)[1:]
    content = {
        "written_by": f"scalec {__version__}",
        "schema": SCHEMA,
        "name": run_word(source.path),
        "plan": file_word(source.path),
        **({"target": TORCH_ALONE} if torch_alone else {}),
        **_sized(program),
        "shard": [
            f"{c.dim} {'over' if c.split else 'whole on'} {c.axis}{how_claimed(c)}"
            for c in program.claims
        ],
        "parameters": {
            "count": parameter_count(program),
            **({"active": active_count(program)} if program.choices else {}),
            "shapes": {
                p.name: {dim: program.size(dim) for dim in p.type.dims} for p in program.params
            },
        },
        "settings": {
            "train": _plain(program.train),
            "cluster": _plain(_beside(program).cluster),
            **({"state": _plain(program.flow)} if model.flow.bucket == AUTO else {}),
            **({"watch": _plain(program.watch)} if program.watch != Watch() else {}),
        },
        **_accounts(program, bool(torch_alone)),
        **(
            {"smaller": [_sized(it) | _accounts(it, bool(torch_alone)) for it in smaller]}
            if smaller
            else {}
        ),
        "certificate": certificate(proof, matched, program, bool(torch_alone), tried, hashes),
        **{
            key: {name: digest(text) for name, text in files.items()}
            for key, files in (("files", torch_alone), ("modules", modules))
            if files
        },
        "model": print_ir(_beside(model)).splitlines(),
    }
    return _text(content)


def as_kept(text: str) -> str:
    """A plan.json whose certificate says that its proof was kept from an earlier command."""
    content = json.loads(text)
    content["certificate"]["values"]["evaluated"] = KEPT
    return _text(content)


def _text(content: Mapping[str, object]) -> str:
    entries = (f"  {json.dumps(key)}: {_written(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _sized(program: Program) -> dict[str, Any]:
    return {
        "mesh": {axis.name: axis.size for axis in program.axes},
        "dims": {dim.name: dim.size for dim in program.dims},
    }


def _accounts(program: Program, torch_alone: bool) -> dict[str, Any]:
    """A step: its stages, communication, memory and, where it is known, time.

    Programs of torch alone compare nothing.
    """
    return {
        **({"pipeline": _pipeline(program, program.pipeline)} if program.pipeline else {}),
        "collectives": [
            _collective(each) for rank in places(program) for each in collectives(program, rank)
        ],
        "evaluation": [
            _collective(each) for rank in places(program) for each in evaluation(program, rank)
        ],
        **({} if torch_alone else {"compared": [_as_json(each) for each in compared(program)]}),
        "memory": _memory(program),
        **({"time": time} if (time := _time(program)) else {}),
    }


def _beside(program: Program) -> Program:
    """The same with its cluster's file where it is copied to."""
    cluster = program.cluster
    return (
        evolve(program, cluster=evolve(cluster, hardware=PurePath(cluster.hardware).name))
        if cluster.hardware
        else program
    )


def _written(value: object) -> str:
    """JSON text; the elements of a list have a line each, which is written many times faster
    than indented.
    """
    if not isinstance(value, list) or not value:
        return json.dumps(value, indent=2).replace("\n", "\n  ")
    return (
        "[\n"
        + ",\n".join(f"    {json.dumps(each)}" for each in cast(list[object], value))
        + "\n  ]"
    )


def _pipeline(program: Program, pipeline: Pipeline) -> dict[str, Any]:
    """The stages of each rank of the axis, the layers that they have, and the actions of the rank
    in their order.

    A stage runs its collectives in its forward and backward; the part for weights communicates
    nothing.
    """
    assert pipeline.schedule, "emit: no schedule"
    layers = [
        dict(zip(pipeline.dims, stage.layers, strict=True)) for stage in stages(program, pipeline)
    ]
    return {
        "axis": pipeline.axis,
        "stages": [
            {"rank": rank, "layers": {dim: [own.start, own.stop] for dim, own in its.items()}}
            for rank, its in zip(pipeline.stage_to_rank, layers, strict=True)
        ],
        "rows": [*map(" ".join, pipeline.schedule.words)],
    }


def _as_json(each: Compared) -> dict[str, Any]:
    of = {"of": [*each.of]} if each.of else {}
    return {"what": each.what, **of, "over": [*each.over], "when": each.when}


def _memory(program: Program) -> dict[str, Any]:
    """The memory account of one rank, in bytes; `count` of each saved tensor is for one microbatch.

    A pipeline's is that of the rank that needs most, and of a microbatch in each of its stages.
    """
    it = account(program)
    return {
        **({} if it.rank is None else {"rank": it.rank}),
        "device": it.device,
        "buckets": [asdict(bucket) | {"slots": dict(bucket.slots)} for bucket in it.buckets],
        "state": it.state,
        "inputs": it.inputs,
        "tables": it.tables,
        "kept": [
            {
                "op": kept.op.kind,
                "line": str(kept.op.span),
                "what": kept.what,
                "bytes": kept.bytes,
                "count": kept.layers,
            }
            for kept in it.kept
        ],
        "activations": it.activations,
        "peak": {
            "bytes": it.total,
            "kept": it.peak.kept,
            "weights": it.peak.weights,
            "gradients": it.peak.gradients,
            "other": it.peak.other,
            "in": it.peak.where,
            "layers": {dim: at for dim, at, _ in it.peak.layers},
            "of": it.peak.name,
            "line": str(it.peak.op.span) if it.peak.op else "",
        },
        "reserve": it.reserve,
        "range": _range(program, it),
        "capacity": capacity(program),
        **(
            {"loads": loads}
            if (loads := [_load(program, *each) for each in at_loads(program)])
            else {}
        ),
    }


def _range(program: Program, counted: Account) -> dict[str, Any]:
    """The least and the most bytes that the rank needs on its device, its reserve among them,
    with the reasons.
    """
    need = need_range(program, counted)
    reasons = [
        {"what": reason.what, "less": reason.less, "more": reason.more} for reason in need.reasons
    ]
    return {"low": need.low, "high": need.high, "reasons": reasons}


def _time(program: Program) -> dict[str, Any]:
    """The time of a step, where the speed of the plan's GPUs is known."""
    if (it := expected(program)) is None:
        return {}
    from ..analysis.time.report import as_json

    return as_json(it)


def _load(program: Program, load: Load, of_ranks: Sequence[Account]) -> dict[str, Any]:
    """Needs of the rank that needs most, with a load of its experts; `rows` are by dim of
    experts.
    """
    it = max(of_ranks, key=lambda it: it.needs)
    return {
        "load": load.name,
        "rows": dict(load.rows),
        "bytes": it.total,
        "fits": fits(program, it),
    }


def digest(text: str) -> str:
    """The hash of a file beside a program: SHA-256 of its bytes."""
    return sha256(text.encode()).hexdigest()


DERIVED = ("master", "reduce", "room", "save_every", "keep", "keep_every")
"""Settings that follow from others, or are the runtime's, where they are unset."""


def _plain(settings: Any) -> dict[str, Any]:
    def said(attribute: "Attribute[Any]", value: Any) -> bool:
        return attribute.name != "spans" and not (value is None and attribute.name in DERIVED)

    return asdict(settings, filter=said)


def _collective(each: Collective) -> dict[str, Any]:
    def said(attribute: "Attribute[Any]", value: Any) -> bool:
        return attribute.default is NOTHING or value != attribute.default

    return asdict(each, filter=said) | {"bytes": each.bytes}


# ---- what a model is known by

_OF_A_RUN = re.compile(
    r"(axis|claim|state|bucket|pipeline|held|given|row|dim (batch|microbatches|seq)) "
)
_NOT_COMPUTED = re.compile(r" !\S+:\d+|\b(bf16|f16|f32|f64)(?=\[)| ~ \w+\([^)]*\)")
"""Lines of the plan, element types, initial values."""


def known_unpadded(model: Program) -> str:
    """The same hash as of the model without padding, where it has any; "" where it has none."""
    unpadded = [evolve(dim, size=dim.valid) for dim in model.dims]
    return known_by(evolve(model, dims=tuple(unpadded))) if is_padded(model) else ""


def is_padded(program: Program) -> bool:
    """Whether a dim has padding."""
    return any(dim.valid != dim.size for dim in program.dims)


def known_by(model: Program) -> str:
    """The hash of a model before any placement: of its dims, parameters and ops; "" for a program
    that has placements.

    No mesh, microbatch or precision changes it.  A run says by it that it goes on with the model of
    its checkpoint; sizes that a checkpoint's own tensors tell apart are not in it, nor how
    parameters begin.
    """
    if model.after != "resolve":
        return ""
    _, _, ir = print_ir(model).partition(f"\nprogram {model.name} after ")
    _first_line, _, body = ir.partition("\n")
    lines = [_NOT_COMPUTED.sub("", line) for line in body.splitlines() if not _OF_A_RUN.match(line)]
    return sha256("\n".join(lines).encode()).hexdigest()[:12]
