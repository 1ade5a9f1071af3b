"""Holds `PLAN`, the settings of the run, to the program.

Non-goals: the optimizer's settings and buckets (`build`).
"""

import ast
from collections.abc import Mapping

from ...analysis.memory import account, accounts
from ...analysis.vocabulary import vocabulary
from ...ir import Program, base, blocks
from .execute import Machine
from .terms import called, demand, frozen_key, wrong


def check_plan(machine: Machine, node: ast.Assign, plan: object, program: Program, stored: Mapping[str, str]) -> None:
    """`PLAN` says what the program says; `stored` is what it says of files of weights.

    The model's hash is not read: of the model before any placement a program does not tell.
    """
    made = called(plan, "Plan")
    if made is None or made[0]:
        raise wrong(node, "is no plan")
    said, texts = made[1], {**_plan(program), **stored}
    expected = {key: machine.spec(text) for key, text in texts.items()}
    expected |= {key: said[key] for key in ("name", "model") if isinstance(said.get(key), str)}
    assert isinstance(node.value, ast.Call), "emit: no plan"
    at = {keyword.arg: keyword.value for keyword in node.value.keywords}
    demand(node, isinstance(said.get("name"), str), "is no name")  # of the plan's file
    same = {*said} == {"name", *expected}
    demand(node, same, f"sets {', '.join(map(str, said))}, not {', '.join(expected)}")
    for key, wanted in expected.items():
        demand(at[key], frozen_key(said[key]) == frozen_key(wanted), f"`{key}` is {said[key]}, not {wanted}")


def _plan(program: Program) -> dict[str, str]:
    """Each setting of the plan as Python writes it."""
    train, schedule = program.train, program.train.optimizer.schedule
    floor = f", floor={schedule.floor!r}" if schedule.kind == "cosine" else ""
    numbers = {"seq": train.seq, "global_batch": train.global_batch, "steps": train.steps, "seed": train.seed}
    return {
        "mesh": repr({axis.name: axis.size for axis in program.axes}),
        "data": _data(program),
        "inputs": _inputs(program),
        "vocab": repr(program.valid(vocabulary(program))),
        "microbatches": repr(program.size("microbatches")),
        "lr": repr(train.optimizer.lr),
        "schedule": f"{schedule.kind.capitalize()}(warmup={schedule.warmup}{floor})",
        **{name: repr(number) for name, number in numbers.items()},
        **({"nodes": repr(program.cluster.nodes)} if program.cluster.nodes > 1 else {}),
        "account": _account(program),
    }


def _account(program: Program) -> str:
    """Of all ranks along a pipeline's axis; without one, of one that stands for all."""
    found = accounts(program) if program.pipeline else [account(program)]
    options = f", reserve={found[0].reserve}" if found[0].reserve else ""
    options += f", axis={program.pipeline.axis!r}" if program.pipeline else ""
    return f"Account({found[0].device!r}, {tuple(it.total for it in found)!r}{options})"


def _data(program: Program) -> str:
    data = program.train.data
    dtype = f", dtype=torch.{data.dtype}" if data.kind == "tokens" else ""
    options = f", separator={data.separator_id}" if data.separator is not None else ""
    options += f", masked={data.masked!r}, mask_token={data.mask_id}" if data.masked is not None else ""
    return f"{data.kind.capitalize()}({tuple(data.files)!r}, holdout={data.holdout!r}{options}{dtype})"


def _inputs(program: Program) -> str:
    """Each input's dims as they lie in memory, and the axes over which each is split."""
    found: dict[str, str] = {}
    for arg in blocks(program)[0].args:
        type = arg.value.type
        split = {dim: type.axes_of(dim) for dim in type.dims if type.axes_of(dim)}
        found[base(arg.value.name)] = f"Input({type.dims!r}, {split!r})"
    return f"{{{', '.join(f'{name!r}: {text}' for name, text in found.items())}}}"
