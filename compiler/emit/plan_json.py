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
from ..analysis.compared import Compared, find_comparisons
from ..analysis.elastic import every_size
from ..analysis.expert_loads import Load
from ..analysis.memory import Account, Kept, account, at_loads, capacity, fits, need_range
from ..analysis.time import get_expected_report
from ..config.settings import AUTO, Watch
from ..ir import Claim, Pipeline, Program
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

    `modules` are the files of user ops, `torch_alone` the files of a program of torch alone, name →
    text; `tried` are the functions of user ops that were tried.
    """
    hashes = {name: digest(text) for name, text in modules.items()}
    content: dict[str, object] = {
        "written_by": f"scalec {__version__}",
        "schema": SCHEMA,
        "name": run_word(source.path),
        "plan": file_word(source.path),
    }
    if torch_alone:
        content["target"] = TORCH_ALONE
    content |= _sizes(program)
    content["shard"] = [_claim_text(claim) for claim in program.claims]
    content["parameters"] = _parameters(program)
    content["settings"] = _settings(program, model)
    content |= _accounts(program, bool(torch_alone))
    if smaller := every_size(program)[1:]:
        content["smaller"] = [
            _sizes(sized) | _accounts(sized, bool(torch_alone)) for sized in smaller
        ]
    content["certificate"] = certificate(proof, matched, program, bool(torch_alone), tried, hashes)
    if torch_alone:
        content["files"] = {name: digest(text) for name, text in torch_alone.items()}
    if modules:
        content["modules"] = hashes
    content["model"] = print_ir(_beside(model)).splitlines()
    return _text(content)


def _claim_text(claim: Claim) -> str:
    """A placement that the plan claims: `heads over tp`, with the reason."""
    preposition = "over" if claim.split else "whole on"
    return f"{claim.dim} {preposition} {claim.axis}{how_claimed(claim)}"


def _parameters(program: Program) -> dict[str, Any]:
    parameters: dict[str, Any] = {"count": parameter_count(program)}
    if program.choices:
        parameters["active"] = active_count(program)
    shapes = parameters["shapes"] = dict[str, dict[str, int]]()
    for param in program.params:
        shapes[param.name] = {dim: program.size(dim) for dim in param.type.dims}
    return parameters


def _settings(program: Program, model: Program) -> dict[str, Any]:
    """The sections of the plan; what the compiler chose is in them only where the plan asks."""
    settings = {
        "train": _plain(program.train),
        "cluster": _plain(_beside(program).cluster),
    }
    if model.flow.bucket == AUTO:
        settings["state"] = _plain(program.flow)
    if program.watch != Watch():
        settings["watch"] = _plain(program.watch)
    return settings


def as_kept(text: str) -> str:
    """A plan.json whose certificate says that its proof was kept from an earlier command."""
    content = json.loads(text)
    content["certificate"]["values"]["evaluated"] = KEPT
    return _text(content)


def _text(content: Mapping[str, object]) -> str:
    entries = (f"  {json.dumps(key)}: {_json_text(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _sizes(program: Program) -> dict[str, Any]:
    return {
        "mesh": {axis.name: axis.size for axis in program.axes},
        "dims": {dim.name: dim.size for dim in program.dims},
    }


def _accounts(program: Program, torch_alone: bool) -> dict[str, Any]:
    """A step: its stages, communication, memory and, where it is known, time.

    Programs of torch alone compare nothing.
    """
    accounts: dict[str, Any] = {}
    if program.pipeline:
        accounts["pipeline"] = _pipeline(program, program.pipeline)
    step, evaluation_step = list[dict[str, Any]](), list[dict[str, Any]]()
    for rank in places(program):
        step += map(_collective, collectives(program, rank))
        evaluation_step += map(_collective, evaluation(program, rank))
    accounts |= {"collectives": step, "evaluation": evaluation_step}
    if not torch_alone:
        accounts["compared"] = [_as_json(comparison) for comparison in find_comparisons(program)]
    accounts["memory"] = _memory(program)
    if time := _time(program):
        accounts["time"] = time
    return accounts


def _beside(program: Program) -> Program:
    """The program whose cluster's file is beside the output, where the file is copied."""
    cluster = program.cluster
    if not cluster.hardware:
        return program
    hardware = PurePath(cluster.hardware).name
    return evolve(program, cluster=evolve(cluster, hardware=hardware))


def _json_text(value: object) -> str:
    """JSON text; each element of a list has one line, which is written many times faster than
    indented text.
    """
    if not isinstance(value, list) or not value:
        return json.dumps(value, indent=2).replace("\n", "\n  ")
    lines = [f"    {json.dumps(element)}" for element in cast(list[object], value)]
    return "[\n" + ",\n".join(lines) + "\n  ]"


def _pipeline(program: Program, pipeline: Pipeline) -> dict[str, Any]:
    """The stages of each rank of the axis, the layers that they have, and the actions of the rank
    in their order.

    A stage runs its collectives in its forward and backward; the part for weights communicates
    nothing.
    """
    assert pipeline.schedule, "emit: no schedule"
    rows = list[dict[str, Any]]()
    for rank, stage in zip(pipeline.stage_to_rank, stages(program, pipeline), strict=True):
        layers = dict[str, list[int]]()
        for dim, numbers in zip(pipeline.dims, stage.layers, strict=True):
            layers[dim] = [numbers.start, numbers.stop]
        rows.append({"rank": rank, "layers": layers})
    return {
        "axis": pipeline.axis,
        "stages": rows,
        "rows": [*map(" ".join, pipeline.schedule.words)],
    }


def _as_json(comparison: Compared) -> dict[str, Any]:
    content: dict[str, Any] = {"what": comparison.what}
    if comparison.param_names:
        content["of"] = [*comparison.param_names]
    return content | {"over": [*comparison.over], "when": comparison.when}


def _memory(program: Program) -> dict[str, Any]:
    """The memory account of one rank, in bytes; `count` of each saved tensor is for one microbatch.

    A pipeline's account is for the rank that needs most, and for a microbatch in each of its
    stages.
    """
    counted = account(program)
    content: dict[str, Any] = {}
    if counted.rank is not None:
        content["rank"] = counted.rank
    content |= {
        "device": counted.device,
        "buckets": [asdict(bucket) | {"slots": dict(bucket.slots)} for bucket in counted.buckets],
        "state": counted.state,
        "inputs": counted.inputs,
        "tables": counted.tables,
        "kept": [_saved_tensor(saved) for saved in counted.kept],
        "activations": counted.activations,
        "peak": _peak(counted),
        "reserve": counted.reserve,
        "range": _range(program, counted),
        "capacity": capacity(program),
    }
    if loads := [_load(program, *load) for load in at_loads(program)]:
        content["loads"] = loads
    return content


def _saved_tensor(saved: Kept) -> dict[str, Any]:
    """A tensor that forward saves for backward."""
    return {
        "op": saved.op.kind,
        "line": str(saved.op.span),
        "what": saved.what,
        "bytes": saved.bytes,
        "count": saved.layers,
    }


def _peak(counted: Account) -> dict[str, Any]:
    """The moment at which a rank holds most."""
    peak = counted.peak
    return {
        "bytes": counted.total,
        "kept": peak.kept,
        "weights": peak.weights,
        "gradients": peak.gradients,
        "other": peak.other,
        "in": peak.where,
        "layers": {dim: layer for dim, layer, _ in peak.layers},
        "of": peak.name,
        "line": str(peak.op.span) if peak.op else "",
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
    report = get_expected_report(program)
    if report is None:
        return {}
    from ..analysis.time.report import as_json

    return as_json(report)


def _load(program: Program, load: Load, of_ranks: Sequence[Account]) -> dict[str, Any]:
    """Needs of the rank that needs most, with a load of its experts; `rows` are by dim of
    experts.
    """
    most = max(of_ranks, key=lambda account: account.needs)
    return {
        "load": load.name,
        "rows": dict(load.rows),
        "bytes": most.total,
        "fits": fits(program, most),
    }


def digest(text: str) -> str:
    """The hash of a file beside a program: SHA-256 of its bytes."""
    return sha256(text.encode()).hexdigest()


DERIVED = ("master", "reduce", "room", "save_every", "keep", "keep_every")
"""Settings that follow from others, or that the runtime chooses, where they are unset."""


def _plain(settings: Any) -> dict[str, Any]:
    def is_set(attribute: "Attribute[Any]", value: Any) -> bool:
        return attribute.name != "spans" and not (value is None and attribute.name in DERIVED)

    return asdict(settings, filter=is_set)


def _collective(collective: Collective) -> dict[str, Any]:
    def is_set(attribute: "Attribute[Any]", value: Any) -> bool:
        return attribute.default is NOTHING or value != attribute.default

    return asdict(collective, filter=is_set) | {"bytes": collective.bytes}


# ---- the hash of a model

_OF_A_RUN = re.compile(
    r"(axis|claim|state|bucket|pipeline|held|given|row|dim (batch|microbatches|seq)) "
)
_NOT_COMPUTED = re.compile(r" !\S+:\d+|\b(bf16|f16|f32|f64)(?=\[)| ~ \w+\([^)]*\)")
"""Lines of the plan, element types, initial values."""


def get_unpadded_hash(model: Program) -> str:
    """The hash of the model without padding, where it has any; "" where it has none."""
    if not is_padded(model):
        return ""
    unpadded = [evolve(dim, size=dim.valid) for dim in model.dims]
    return get_model_hash(evolve(model, dims=tuple(unpadded)))


def is_padded(program: Program) -> bool:
    """Whether a dim has padding."""
    return any(dim.valid != dim.size for dim in program.dims)


def get_model_hash(model: Program) -> str:
    """The hash of a model before any placement; "" for a program that has placements.

    It covers the model's dims, parameters and ops.

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
