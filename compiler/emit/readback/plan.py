"""Compares `PLAN`, the settings of the run, with the program, and the files that it reads: names
and predictions.

Non-goals: the optimizer's settings and buckets (`build`).
"""

import ast
from collections.abc import Mapping
from json import dumps
from typing import Any

from ... import __version__
from ...analysis.elastic import every_size, sizes
from ...analysis.file_shapes import get_file_shapes
from ...analysis.memory import accounts, at_loads
from ...analysis.time import get_expected_report
from ...analysis.vocabulary import vocabulary
from ...config.hf_names import HFWeight
from ...config.settings import ON, Watch
from ...ir import SEQUENCE, Buffer, Param, Program, base
from ...ops.routers import choices_with_capacity
from ..hf_names import get_program_with_names
from ..naming import DTYPES
from .constants import companion_call
from .machine import Machine
from .terms import demand, frozen_key, get_call, wrong


def check_plan(
    machine: Machine, node: ast.Assign, plan: object, program: Program, stored: Mapping[str, str]
) -> None:
    """`PLAN` says what the program says; `stored` is what it says of files of weights.

    The model's hashes are not read: of the model before any placement a program does not tell.
    """
    if sizes(program)[1:] and program is not every_size(program)[0]:
        return  # the plan says all sizes, and is compared with the largest
    plan_call = get_call(plan, "Plan")
    if plan_call is None or plan_call[0]:
        raise wrong(node, "is no plan")
    settings, texts = plan_call[1], {**_plan(program), **stored}
    expected = {key: machine.spec(text) for key, text in texts.items()}
    expected |= {
        key: settings[key]
        for key in ("name", "model", "unpadded")
        if isinstance(settings.get(key), str)
    }
    assert isinstance(node.value, ast.Call), "emit: no plan"
    nodes = {keyword.arg: keyword.value for keyword in node.value.keywords}
    demand(node, isinstance(settings.get("name"), str), "is no name")  # of the plan's file
    same = {*settings} == {"name", *expected}
    demand(node, same, f"sets {', '.join(map(str, settings))}, not {', '.join(expected)}")
    for key, wanted in expected.items():
        demand(
            nodes[key],
            frozen_key(settings[key]) == frozen_key(wanted),
            f"`{key}` is {settings[key]}, not {wanted}",
        )


def _plan(program: Program) -> dict[str, str]:
    """Each setting of the plan as Python writes it."""
    train, schedule = program.train, program.train.optimizer.schedule
    floor = f", floor={schedule.floor!r}" if schedule.kind == "cosine" else ""
    numbers = {
        "seq": train.seq,
        "global_batch": train.global_batch,
        "steps": train.steps,
        "seed": train.seed,
    }
    return {
        "mesh": repr({axis.name: axis.size for axis in program.axes}),
        "data": _data(program),
        "inputs": _inputs(program),
        "vocab": repr(program.valid(vocabulary(program))),
        "microbatches": repr(program.size("microbatches")),
        "lr": repr(train.optimizer.lr),
        "schedule": f"{schedule.kind.capitalize()}(warmup={schedule.warmup}{floor})",
        **{name: repr(number) for name, number in (numbers | train.saves).items()},
        **_nodes(program),
        **_special(program),
        "predictions": _predictions(program),
    }


def _special(program: Program) -> dict[str, str]:
    """The settings that only some programs have."""
    settings = dict[str, str]()
    if len(sizes(program)) > 1:
        settings["smaller"] = _smaller(program)
    if program.watch != Watch():
        settings["watch"] = _watch(program)
    if choices := choices_with_capacity(program):
        settings["choices"] = repr(choices)
    return settings


def _watch(program: Program) -> str:
    watch = program.watch
    steps = f"finite={watch.finite}, skips={watch.skips}, locate={watch.locate == ON}"
    times = f"copies={watch.copies}, replay={watch.replay}, spikes={watch.deviations}"
    return f"Watch({steps}, {times})"


def _nodes(program: Program) -> dict[str, str]:
    nodes = program.cluster.nodes
    return {"nodes": repr(nodes)} if nodes > 1 else {}


def _smaller(program: Program) -> str:
    """The other sizes of an elastic axis."""
    rows = list[str]()
    for sized in every_size(program)[1:]:
        arguments = [repr({axis.name: axis.size for axis in sized.axes})]
        arguments.append(f"microbatches={sized.size('microbatches')!r}")
        arguments += [f"{key}={text}" for key, text in _nodes(sized).items()]
        rows.append(f"SmallerMesh({', '.join(arguments)})")
    return f"({', '.join(rows)},)"


def _data(program: Program) -> str:
    data = program.train.data
    dtype = f", dtype=torch.{data.dtype}" if data.kind == "tokens" else ""
    as_is = ", as_is=True" if data.as_is == ON else ""
    options = f", separator={data.separator_id}" if data.separator is not None else ""
    options += (
        f", masked={data.masked!r}, mask_token={data.mask_id}" if data.masked is not None else ""
    )
    sets = list[str]()
    for data_set in data.mixture:
        arguments = f"{data_set.name!r}, {data_set.files!r}, weight={data_set.weight!r}"
        sets.append(f"DataSet({arguments}, holdout={data_set.holdout!r})")
    files = f"sets=({', '.join(sets)},)" if sets else repr(data.files)
    return f"{data.kind.capitalize()}({files}, holdout={data.holdout!r}{options}{dtype}{as_is})"


def _inputs(program: Program) -> str:
    """Each input's dims as they lie in memory, and the axes over which each is split."""
    texts: dict[str, str] = {}
    for arg in program.microbatches.args:
        type = arg.value.type
        split = {dim: type.axes_of(dim) for dim in type.dims if type.axes_of(dim)}
        chunked = [
            axis for dim, axes in split.items() for axis in axes if (dim, axis) in program.zigzags
        ]
        zigzag = f", zigzag={tuple(chunked)!r}" if chunked else ""
        texts[base(arg.value.name)] = f"Input({type.dims!r}, {split!r}{zigzag})"
    return f"{{{', '.join(f'{name!r}: {text}' for name, text in texts.items())}}}"


# ---- the file of predictions


def _predictions(program: Program) -> str:
    """The call that reads the file with memory and time of a step on each mesh of the program."""
    meshes = list[dict[str, Any]]()
    for sized in every_size(program):
        of_mesh: dict[str, Any] = {"mesh": {axis.name: axis.size for axis in sized.axes}}
        meshes.append(of_mesh | {"account": _account(sized)} | _expected(sized))
    content = {"written_by": f"scalec {__version__}", "predictions": meshes}
    return companion_call("read_predictions", "predictions.json", dumps(content, indent=1) + "\n")


def _account(program: Program) -> dict[str, object]:
    """The account of all ranks along a pipeline's axis; without one, of one rank for all; with
    experts, two of each.
    """
    loads = [accounts_at_load for _, accounts_at_load in at_loads(program)] or [accounts(program)]
    equal, worst = loads[0], loads[-1]
    content: dict[str, object] = {
        "device": equal[0].device,
        "ranks": [account.total for account in equal],
    }
    if equal[0].reserve:
        content["reserve"] = equal[0].reserve
    if program.pipeline:
        content["axis"] = program.pipeline.axis
    if worst is not equal:
        content["most"] = [account.total for account in worst]
    return content


def _expected(program: Program) -> dict[str, object]:
    """The time of a step; none where the speed of the plan's GPUs is not known."""
    report = get_expected_report(program)
    if report is None:
        return {}
    time = {"gpu": report.on.name, "seconds": float(f"{report.step.seconds:.4g}")}
    time |= {"error": report.on.error, "flops_per_token": report.per_token}
    return {"expected": time | {"peak_flops": report.peak}}


# ---- the file of names


def settings_of_files(program: Program, paths: dict[str, str], dtype: str) -> dict[str, str]:
    """The settings `names` and `padded_rows`, if the program has such.

    `paths` are the parameters' name patterns, `dtype` the model's element type.
    """
    rows = {
        paths[param.name]: count
        for param in program.params
        if (count := _valid_rows(param, program))
    }
    return {**({"padded_rows": repr(rows)} if rows else {}), **_names(program, paths, dtype)}


def _valid_rows(param: Param, program: Program) -> int:
    """The rows of a parameter without padding, where its rows are one dim that has some; else 0."""
    outer = param.type.dims[param.stacked : len(param.type.dims) - param.inner]
    if not outer or (param.inner and outer[1:]):  # several dims are the rows of a product
        return 0
    rows, *_ = outer
    return program.valid(rows) if program.valid(rows) != program.size(rows) else 0


def _names(plan: Program, paths: dict[str, str], dtype: str) -> dict[str, str]:
    program = get_program_with_names(plan, paths)
    if not program.names:
        return {}
    entries = (
        f"  {dumps(paths[weight.param])}: {dumps(_place(weight, program))}"
        for weight in program.names
    )
    head = (
        f'"written_by": "scalec {__version__}",\n "dtype": "{DTYPES[dtype].removeprefix("torch.")}"'
    )
    weights = '"weights": {\n' + ",\n".join(entries) + "\n }"
    text = f'{{{head},\n "repeats": {dumps(_counts(program, paths))},\n {weights}}}\n'
    return {"names": companion_call("read_hf_names", "hf_names.json", text)}


def _counts(program: Program, paths: dict[str, str]) -> dict[str, int]:
    """The size of each repeat that has parameters, by the path of its modules."""
    counts = dict[str, int]()
    for param in program.params_and_buffers:
        for depth in range(param.stacked):
            path = paths[param.name].rsplit(".*.", param.stacked - depth)[0]
            counts[path] = program.size(param.type.dims[depth])
    return counts


def _place(weight: HFWeight, program: Program) -> dict[str, object]:
    """One entry."""
    params = {param.name: param for param in program.params_and_buffers}
    shapes = get_file_shapes(program)
    rows = {
        other.part: shapes[other.param][0]
        for other in program.names
        if other.tensor == weight.tensor
    }
    stored_param = params[weight.param]
    shape = (sum(rows.values()), *shapes[weight.param][1:])
    start = sum(rows[part] for part in range(weight.part))
    content: dict[str, object] = {
        "tensor": weight.tensor,
        "shape": shape[::-1] if weight.is_transposed else shape,
    }
    for experts in program.outer(stored_param)[stored_param.stacked :]:
        content["each"] = experts, program.size(experts)
    if weight.part:
        content["start"] = start
    if weight.is_transposed:
        content["transposed"] = True
    if isinstance(stored_param, Buffer):
        content["wide"] = True
    if weight.interleaved:
        outer = stored_param.type.dims[: -stored_param.inner or None]
        content["interleaved"] = (
            weight.skipped,
            weight.skipped + weight.interleaved,
            program.valid(outer[-1]),
        )
    if stored_param.type.dims[stored_param.stacked :][:1] == (SEQUENCE,) and not (
        stored_param.inner or weight.is_transposed or weight.parts > 1
    ):
        content["positions"] = True
    return content
