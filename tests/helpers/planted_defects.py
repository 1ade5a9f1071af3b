"""Plants a defect where it would arise, and asks each level of the compiler what it says.

A defect is written as a reader would see it: lines of the IR, or of the emitted program, and what
stands there instead.  Non-goals: running programs (`runs`).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from attrs import Factory, evolve, field, frozen

from helpers.edited_text import replace_once
from helpers.plan_table import DP_TP, PLANS
from helpers.small_plans import ALL_OVER_TP, ATTENTION, DIMS, HEAD, LLAMA, START, WITH_SEQ, Plan
from scalec.compiler.analysis.verifier import check
from scalec.compiler.emit.readback import check as read_back
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import SEQUENCE, Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof.inputs import Inputs
from scalec.compiler.proof.interpreter import Interpreter, ShapeError
from scalec.compiler.proof.pipeline.rows import run_rows
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import Case, case_of, differences
from scalec.compiler.proof.reference import Reference
from scalec.compiler.proof.semantics import MEANINGS, Call, Semantics
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.small_sizes import Sizes, meshes, resize
from scalec.compiler.proof.tensors import Array, Tensor
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower
from scalec.testing.audit.mutants.faults import FAULTS

Edits = Mapping[str, str]

CONTEXT: dict[str, Any] = {"mesh": "dp = 2  cp = 2", "ranks": 2, "seq": 8}
PARTS = "batch over dp  seq over cp"
GATED = LLAMA.replace(
    "x = x + attention(q, k, v, mask=causal) @",
    "g = silu(a @ wg[hidden -> heads, head_dim])  x = x + (attention(q, k, v, mask=causal) * g) @",
)
FULL, WINDOWS = (
    LLAMA.replace("mask=causal", mask) for mask in ("mask=full", "mask=causal, window=3")
)
PACKED = LLAMA.replace("attention(q, k, v,", "attention(q, k, v, documents,")
ROUTED = f"""{START}
  repeat layers {{{{
    {ATTENTION}
    m = rmsnorm(x, norm2[hidden], eps)
    route m to experts by top(m @ router[hidden -> experts], 2, normalise=on{{}}) {{{{
      m = (silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]
    }}}}
    x = x + m
  }}}}
  {HEAD}"""
EXPERTS: dict[str, Any] = {
    "mesh": "dp = 2  ep = 2",
    "shard": "experts over ep  batch over dp, ep",
    "ranks": 4,
}
SAME: dict[str, Any] = {
    "mesh": "dp = 2  tp = 2",
    "shard": "experts over tp  batch over dp  vocab, heads, kv_heads over tp",
}
SHARED = (
    ROUTED.format("")
    .replace("route m to", "s = m  route m to")
    .replace("x = x + m", "x = x + m + silu(s @ s_up[hidden -> wide]) @ s_down[wide -> hidden]")
)
SPREAD: dict[str, Any] = {
    "mesh": "dp = 2  cp = 2",
    "shard": f"experts over cp  {PARTS}",
    "ranks": 2,
    "seq": 8,
}
TEXTS = {name: plan.text() for name, plan in PLANS.items()}
TEXTS |= {
    "llama": PLANS["data, tensor, sequence"].text(),  # dp 2 × tp 2, two microbatches, no clipping
    "adamw": PLANS["data, tensor, sequence"].text().replace("optimizer sgd", "optimizer adamw"),
    "tensor axis of size 1": Plan(mesh="dp = 2  tp = 1", shard=WITH_SEQ, ranks=2).text(),
    "axes of size 1, shared": evolve(PLANS["axes of size 1"], state="zero 3 over dp").text(),
    "a repeat of one, shared": evolve(
        PLANS["shared parameters"], dims=DIMS.replace("layers = 2", "layers = 1")
    ).text(),
    "activation of a row": Plan(
        mesh="dp = 2  tp = 2",
        shard=ALL_OVER_TP,
        ranks=2,
        body=f"{START} x = x + silu(silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]) {HEAD}",
    ).text(),
    "stages": evolve(  # the embedding is on both
        DP_TP,
        mesh="pp = 2  dp = 2  tp = 2",
        shard=f"{WITH_SEQ}  layers over pp",
        body=LLAMA.replace("head[hidden -> vocab]", "wte"),
        clip=0.1,
    ).text(),
    "gathered": Plan(**CONTEXT, shard=f"{PARTS} as zigzag").text(),
    "ring": Plan(**CONTEXT, shard=f"{PARTS} as zigzag via ring").text(),
    "exchanged": Plan(**CONTEXT, shard=f"{PARTS} via ulysses").text(),
    "windows": Plan(**CONTEXT, shard=PARTS, body=WINDOWS).text(),
    "gathered, full": Plan(
        **CONTEXT, shard=f"{PARTS} as zigzag", body=FULL, word="bidirectional"
    ).text(),
    "ring, full": Plan(
        **CONTEXT, shard=f"{PARTS} as zigzag via ring", body=FULL, word="bidirectional"
    ).text(),
    "windows of a ring": Plan(**CONTEXT, shard=f"{PARTS} via ring", body=WINDOWS).text(),
    "windows, exchanged": Plan(**CONTEXT, shard=f"{PARTS} via ulysses", body=WINDOWS).text(),
    "gated heads": Plan(
        GATED, mesh="tp = 4", shard="vocab, heads, kv_heads, ffn over tp  seq over tp"
    ).text(),
    "packed": Plan(
        **CONTEXT, shard=f"{PARTS} as zigzag", inputs=", documents[batch, seq]", body=PACKED
    )
    .text()
    .replace("[python_stdlib]", '[python_stdlib]  separator = "\\n"'),
    "experts": Plan(**EXPERTS, dims=f"{DIMS}  experts = 4", body=ROUTED.format("")).text(),
    "experts, clipped": Plan(
        **EXPERTS, dims=f"{DIMS}  experts = 4", body=ROUTED.format(""), clip=0.1
    ).text(),
    "experts of the same tokens": Plan(
        **SAME, ranks=2, dims=f"{DIMS}  experts = 4", body=ROUTED.format("")
    ).text(),
    "a shared expert": Plan(
        **SAME, ranks=2, dims=f"{DIMS}  experts = 4  wide = 8", body=SHARED
    ).text(),
    "experts in bf16": Plan(
        **EXPERTS, dims=f"{DIMS}  experts = 4", body=ROUTED.format(""), train="precision = bf16"
    ).text(),
    "balanced": Plan(
        **SPREAD, dims=f"{DIMS}  experts = 4", body=ROUTED.format(", balance=0.5")
    ).text(),
    "biased": Plan(
        **EXPERTS,
        dims=f"{DIMS}  experts = 4",
        body=ROUTED.format(", bias=router_bias[experts], rate=0.5"),
    ).text(),
    "small logits": Plan(
        **SPREAD, dims=f"{DIMS}  experts = 4", body=ROUTED.format(", z=0.25")
    ).text(),
    "bounded": Plan(
        **SPREAD, dims=f"{DIMS}  experts = 4", body=ROUTED.format(", capacity=1.5")
    ).text(),
    "padded": Plan(
        mesh="tp = 2", shard="vocab over tp", dims=DIMS.replace("vocab = 12", "vocab = 9 pad 4")
    ).text(),
    "vocabulary that does not divide": Plan(
        mesh="tp = 2", shard="vocab over tp", dims=DIMS.replace("vocab = 12", "vocab = 13")
    ).text(),
}
"""Plans by name."""


def _last_ignored(c: Call) -> list[Tensor]:
    """Labels without the last of each rank's part of the sequence."""
    labels = c.args[0]
    array = np.moveaxis(labels.array.copy(), labels.dims.index(SEQUENCE) - len(labels.dims), -1)
    array[..., -1] = -1
    return [
        Tensor(labels.dims, np.moveaxis(array, -1, labels.dims.index(SEQUENCE) - len(labels.dims)))
    ]


DEFECTS = FAULTS | {"last_ignored": Semantics(_last_ignored)}
"""The meanings of what is no op of the IR."""


def _with_defect(defect: "Defect") -> Program:
    return read_ir(
        Source("planted.ir", replace_once(print_ir(lowered(defect.plan, defect.after)), defect.ir))
    )


@frozen
class Defect:
    """A plan of `TEXTS` whose IR after the pass `after`, or whose emitted text, is wrong in
    these lines.
    """

    plan: str
    ir: Edits = field(factory=dict[str, str])
    text: Edits = field(factory=dict[str, str])
    after: str = PASS_NAMES[-1]
    program: Program = field(default=Factory(_with_defect, takes_self=True), init=False, repr=False)

    def types(self) -> str:
        """The message of the check after each pass; empty where types fit."""
        try:
            check(self.program)
        except AssertionError as error:
            return str(error)
        return ""

    def values(self, labels: str = "uneven") -> set[str]:
        """The results of the step that are not the single device's, with `labels` of `LABELS`."""
        return wrong(self.program, lowered(self.plan, "resolve"), labels)

    def emission(self) -> str:
        """The message of the read-back on the emitted text."""
        source, program = Source("tiny.scale", TEXTS[self.plan]), lowered(self.plan)
        text = replace_once(train_py(program, source), self.text)
        with pytest.raises(AssertionError) as raised:
            read_back(text, program)
        return str(raised.value)


@cache
def lowered(plan: str, until: str = PASS_NAMES[-1]) -> Program:
    """The program of a plan of `TEXTS` after a pass."""
    return compile_plan(Source("tiny.scale", TEXTS[plan]), until)


def parameters(plan: str) -> list[str]:
    """The names of a plan's parameters."""
    return [param.name for param in lowered(plan).params]


def results_of(*parameters: str) -> set[str]:
    """The results of a step that differ where, without clipping, the gradients of some
    parameters do.
    """
    return {"norm"}.union(*({f"gradient of {name}", f"updated {name}"} for name in parameters))


# ---- values


def _uneven(labels: Array) -> Array:
    return labels  # a third have none, nor has the first sequence of a microbatch


def _all(labels: Array) -> Array:
    return np.abs(labels)


def _silent_rank(labels: Array) -> Array:
    """The ranks with the first half of each microbatch have no label, the others all."""
    labels = np.abs(labels)
    labels[:, :, : max(1, labels.shape[2] // 2)] = -1
    return labels


def _one(labels: Array) -> Array:
    """A single token of the step has a label."""
    found = np.full_like(labels, -1)
    found[:, -1, -1, -1] = 1
    return found


LABELS = {"uneven": _uneven, "all": _all, "silent rank": _silent_rank, "one token": _one}
"""Which tokens of a step have a label."""


def wrong(program: Program, model: Program, labels: str = "uneven") -> set[str]:
    """The results of a program's step that are not the model's, on any of the verifier's meshes."""
    cases = [_case(program, model, axes) for axes in meshes(program)]
    return set[str]().union(
        *(_unequal(case, Field(2, len(program.axes)), labels) for case in cases)
    )


def _case(program: Program, model: Program, axes: Sizes) -> Case:
    """The program at the sizes of the right one: a fault is no op that sizes could be read off."""
    case = case_of(lower(model), model, axes)
    return evolve(
        case, program=resize(program, axes, {dim.name: dim.size for dim in case.program.dims})
    )


def _unequal(case: Case, numbers: Field, labels: str) -> set[str]:
    """As `proof.unequal`, of programs that may hold the audit's faults, and with other labels."""
    world, start = SimulatedMesh.of_program(case.program), _labelled(case.scene(numbers), labels)
    machine = Interpreter(case.program, world, numbers, meanings=MEANINGS | DEFECTS, rows=run_rows)
    try:
        found = machine.run(start.on(case.program, world, numbers))
    except ShapeError as error:
        return {error.value}
    expected = Reference(case.single, numbers).run(start)
    return {*differences(case.program, world, numbers, found, expected)}


def _labelled(start: Inputs, labels: str) -> Inputs:
    old = start.inputs["labels"]
    return evolve(
        start, inputs=start.inputs | {"labels": Tensor(old.dims, LABELS[labels](old.array.copy()))}
    )
