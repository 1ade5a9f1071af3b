"""Programs of torch alone against the reference in float64: losses, gradients and updates of three
steps.

Non-goals: their text (`emit.test_dtensor`).
"""

import importlib
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from end_to_end import test_fp16
from end_to_end.test_documents import (
    alone,
    document_plan,
    given,
    windowed,
    windowed_plan,
    windows_of,
)
from end_to_end.test_models import BY_FILE as MODELS
from end_to_end.test_models import expected_of, get_start, model_plan
from end_to_end.test_numbers import assert_steps_equal
from helpers import torch_target
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.compare import assert_same
from helpers.oracle.models import HEADS, Model
from helpers.oracle.plans import Case, plan_text
from helpers.programs import import_module, write_program
from scalec.codegen_templates import torch_ops
from scalec.compiler.analysis.bucket_layout import layout_of
from scalec.compiler.emit.dtensor import for_torch
from scalec.compiler.frontend import resolve
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower
from scalec.runtime import Mesh
from scalec.runtime.checkpoint.hf_weights import Reader

LR = 0.01
RINGS = ("via ring", "as zigzag via ring")
INPUTS = ("tokens", "labels", "documents")
BENCHMARKS, EXAMPLES, PLANS = (
    Path(__file__).parents[2] / name for name in ("benchmarks", "examples", "plans")
)
ZERO_3 = Case(
    dp=2,
    microbatches=2,
    kv=1,
    optimizer="groups",
    clip=0.05,
    valid="silent_rank",
    state="zero 3 over dp",
)
FEW = (
    Case(
        tp=2,
        sp=True,
        padded=True,
        smoothing=0.1,
        model="tied",
        recompute="full",
        optimizer="adamw",
        clip=0.05,
        z=0.01,
    ),
    Case(pp=2, schedule="zbv", layers=4, microbatches=4, model="tied", recompute="full"),
)
MANY = (
    Case(),
    Case(
        pp=2,
        dp=2,
        microbatches=2,
        model="tied",
        optimizer="adamw",
        clip=0.05,
        state="zero 1 over dp",
    ),
    ZERO_3,
    Case(tp=2, sp=True, microbatches=2, model="tied", optimizer="momentum"),
    Case(dp=2, tp=2, sp=True),
    Case(replicas=2, tp=2, sp=True, microbatches=2, optimizer="adamw", clip=0.05),
    Case(dp=2, tp=2, kv=1, vocab=False, optimizer="groups", model="tied"),
    Case(tp=4, sp=True, kv=2, optimizer="momentum", clip=0.05, model="parallel"),
    Case(dp=2, tp=2, sp=True, padded=True, smoothing=0.1, z=0.01, microbatches=2, recompute="full"),
    Case(dp=2, tp=2, model="every", microbatches=2, valid="silent_rank"),
    Case(dp=2, tp=2, sp=True, model="every", optimizer="adamw", clip=0.05),
    Case(
        dp=2, tp=2, sp=True, microbatches=2, optimizer="groups", clip=0.05, state="zero 3 over dp"
    ),
    Case(dp=4, optimizer="adamw", clip=0.05, state="zero 1 over dp", microbatches=2),
    Case(replicas=2, dp=2, optimizer="momentum", state="zero 2 over dp", microbatches=2),
    Case(
        replicas=2,
        dp=2,
        optimizer="adamw",
        clip=0.05,
        state="zero 3 over replica, dp",
        recompute="full",
    ),
    Case(tp=2, vocab=False, padded=True, smoothing=0.1, model="tied", recompute="every(2, layers)"),
    Case(dp=2, tp=4, sp=True, kv=1, microbatches=2, optimizer="groups", clip=0.05),
    Case(dp=2, tp=4, sp=True, kv=2, model="latent", optimizer="adamw"),
    Case(dp=2, cp=2, model="tied", microbatches=2),
    Case(uly=2, dp=2, kv=4),
    Case(dp=2, tp=2, rules="batch over dp  ffn over tp", optimizer="adamw"),
    Case(cp=2, tp=2, sp=True, how="as zigzag", microbatches=2, optimizer="adamw"),
    Case(dp=2, cp=2, how="as zigzag", gathered="save", recompute="full"),
    Case(cp=2, how="via ring", gathered="save"),
    Case(tp=2, sp=True, gathered="regather", recompute="selective(attention, silu, rmsnorm, rope)"),
    Case(
        dp=2,
        tp=2,
        sp=True,
        gathered="regather",
        microbatches=2,
        optimizer="adamw",
        clip=0.05,
        state="zero 3 over dp",
    ),
    Case(
        dp=2,
        recompute="selective(attention, embedding, silu)",
        state="zero 2 over dp",
        microbatches=2,
    ),
    Case(
        cp=2,
        tp=2,
        sp=True,
        how="via ring",
        gathered="regather",
        recompute="selective(attention, rope)",
    ),
    Case(dp=2, cp=2, gathered="regather", recompute="selective(silu, rmsnorm)", model="tied"),
    Case(
        pp=2,
        tp=2,
        sp=True,
        layers=4,
        microbatches=4,
        gathered="regather",
        recompute="selective(attention, silu)",
    ),
    Case(cp=4, how="as zigzag via ring", kv=1, microbatches=2, recompute="full", optimizer="adamw"),
    Case(cp=2, tp=2, sp=True, how="via ring", model="latent"),
    Case(dp=2, cp=2, tp=2, sp=True, state="zero 3 over dp, cp", optimizer="adamw", clip=0.05),
    Case(pp=2, schedule="gpipe", stages="[2, 0]", microbatches=4, optimizer="momentum"),
    Case(
        pp=2,
        schedule="interleaved_1f1b(chunks=2)",
        tp=2,
        sp=True,
        layers=4,
        microbatches=4,
        model="tied",
    ),
    Case(
        pp=2,
        schedule="zbv",
        tp=2,
        sp=True,
        layers=4,
        microbatches=4,
        padded=True,
        optimizer="adamw",
        clip=0.05,
    ),
    Case(
        pp=2,
        schedule="zbv",
        dp=2,
        layers=4,
        microbatches=4,
        state="zero 3 over dp",
        recompute="full",
    ),
    Case(pp=2, schedule="dualpipev", dp=2, layers=4, microbatches=4, optimizer="groups", clip=0.05),
    Case(
        pp=2,
        schedule="zb_h1",
        dp=2,
        microbatches=3,
        model="tied",
        state="zero 2 over dp",
        padded=True,
    ),
    Case(pp=3, schedule="zb_h2", stages="[0, 2, 0]", microbatches=4, clip=0.05),
    Case(pp=4, layers=5, microbatches=4, model="tied", optimizer="adamw"),
    Case(pp=2, cp=2, schedule="zbv", layers=4, microbatches=3, recompute="every(2, layers)"),
    Case(
        pp=2, tp=2, model="every", schedule="interleaved_1f1b(chunks=2)", layers=4, microbatches=2
    ),
    Case(pp=2, tp=2, model="latent", microbatches=2),
    Case(pp=2, replicas=2, kv=1, microbatches=2, valid="silent_microbatch"),
    Case(
        pp=2,
        tp=2,
        sp=True,
        microbatches=4,
        recompute="selective(attention, silu)",
        gathered="regather",
    ),
    Case(
        pp=2,
        schedule="zbv",
        tp=2,
        layers=4,
        microbatches=4,
        recompute="selective(attention, silu)",
        model="tied",
    ),
    Case(pp=2, schedule="zbv", cp=2, how="via ring", layers=4, microbatches=2, recompute="full"),
    Case(
        pp=2,
        dp=2,
        tp=2,
        sp=True,
        model="tied",
        microbatches=4,
        optimizer="adamw",
        clip=0.05,
        state="zero 1 over dp",
    ),
)


@pytest.mark.parametrize(
    "case", [*FEW, *(pytest.param(case, marks=pytest.mark.long) for case in MANY)], ids=str
)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    start, batches = reference.initial(case.config), list(harness.batches(case, 3))
    steps = torch_target.run(
        case.ranks, torch_target.load_torch_program(plan_text(case), tmp_path), start, batches, LR
    )
    assert_steps_equal(steps, reference.run(case.config, case.training, start, batches, LR))


@pytest.mark.parametrize(
    "case",
    [ZERO_3, *(pytest.param(case, marks=pytest.mark.long) for case in MANY if case is not ZERO_3)],
    ids=str,
)
def test_both_programs_of_a_plan_are_equal(case: Case, tmp_path: Path) -> None:
    """Three steps of the runtime's program and of torch's: losses, gradients, norms and
    parameters to 1e-10.
    """
    start, batches = reference.initial(case.config), list(harness.batches(case, 3))
    steps = torch_target.run(
        case.ranks,
        torch_target.load_torch_program(plan_text(case), tmp_path / "torch"),
        start,
        batches,
        LR,
    )
    ours = harness.run(case, harness.load_case(case, tmp_path / "runtime"), start, batches, LR)
    assert_steps_equal(steps, ours)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.file)
def test_models_of_the_library_equal_plain_torch(model: Model, tmp_path: Path) -> None:
    """Windows, caps of scores, biases, norms of all kinds."""
    case = Case(dp=2, tp=2, sp=True, kv=2 if model.grouped else HEADS)
    module = torch_target.load_torch_program(
        model_plan(model, case), tmp_path, str(PLANS / "tiny.scale")
    )
    like = run_ranks(case.ranks, torch_target.initial, module)[0]
    start, batches = get_start(like), list(harness.batches(case, 2))
    steps = torch_target.run(case.ranks, module, start, batches, LR)
    for got, want in zip(steps, expected_of(model, case, start, batches), strict=True):
        assert_same(got, want, "", 1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, tp=2, sp=True, microbatches=2),
        Case(cp=2, how="as zigzag", microbatches=2),
        Case(cp=2, how="as zigzag via ring", microbatches=2),
        Case(cp=4, how="via ring", kv=1),
        Case(cp=2, how="via ring", recompute="full"),
        Case(uly=2, dp=2, kv=4),
    ],
    ids=str,
)
def test_documents_are_each_alone(case: Case, tmp_path: Path) -> None:
    module = torch_target.load_torch_program(document_plan(case), tmp_path)
    windows, start = windows_of(case.rows, case.config.vocab), reference.initial(case.config)
    (step,) = torch_target.run(case.ranks, module, start, [given(windows, INPUTS)], LR)
    loss, gradients = alone(case.config, start, windows)
    assert step.loss == pytest.approx(loss, rel=1e-10, abs=0)
    for name, expected in gradients.items():
        torch.testing.assert_close(
            step.gradients[name], expected, rtol=0, atol=1e-10 * expected.abs().max().item()
        )


@pytest.mark.parametrize(
    ("ranks", "how", "window"),
    [
        (2, "as zigzag via ring", 5),
        *(
            pytest.param(4, *each, marks=pytest.mark.long)
            for each in product(("", "as zigzag", *RINGS), (1, 2, 5))
        ),
    ],
)
def test_windows_of_documents_equal_the_runtime_s(
    ranks: int, how: str, window: int, tmp_path: Path
) -> None:
    """The runtime's program is of one rank."""
    case = Case(cp=ranks, how=how, microbatches=2)
    module = torch_target.load_torch_program(windowed_plan(case, window), tmp_path)
    batch = given(windows_of(case.rows, case.config.vocab), INPUTS)
    (step,) = torch_target.run(case.ranks, module, reference.initial(case.config), [batch], LR)
    loss, gradients = windowed(Case(microbatches=2), window, tmp_path)
    assert step.loss == pytest.approx(loss, rel=1e-10, abs=0)
    for name, expected in gradients.items():
        torch.testing.assert_close(
            step.gradients[name], expected, rtol=0, atol=1e-10 * expected.abs().max().item()
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 1e-4), ("bf16", 0.05), ("fp64  reduce = bf16", 0.02), ("fp16  reduce = bf16", 0.02)],
)
@pytest.mark.parametrize("state", ["", "zero 3 over dp"])
@pytest.mark.parametrize(
    "other", [{"tp": 2, "sp": True}, {"pp": 2, "schedule": "zbv", "layers": 4}], ids=["tp", "pp"]
)
def test_narrower_precisions_come_near(
    precision: str, tolerance: float, state: str, other: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(dp=2, microbatches=2, precision=precision, optimizer="sgd", state=state, **other)
    start, batches = reference.initial(case.config), list(harness.batches(case, 2))
    steps = torch_target.run(
        case.ranks, torch_target.load_torch_program(plan_text(case), tmp_path), start, batches, LR
    )
    for got, want in zip(
        steps, reference.run(case.config, case.training, start, batches, LR), strict=True
    ):
        assert got.loss == pytest.approx(want.loss, rel=tolerance)
        assert got.norm == pytest.approx(want.norm, rel=tolerance)


Beyond = dict[tuple[str, tuple[str, ...]], int]
"""Bytes that a rank gives to a kind of collective over some axes, beyond the plan's."""

COMMUNICATING: tuple[tuple[Case, Beyond], ...] = (
    (
        Case(dp=2, tp=2, sp=True, microbatches=2, optimizer="adamw", clip=0.05),
        {("all_reduce", ("tp",)): 648},
    ),
    (ZERO_3, {}),
)
"""Plans, and what torch communicates beyond: a sum over two axes takes two calls, a norm one
for each placement.
"""


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmarks' recorder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("torch_traffic")


def _recorded(traffic: Any, module: ModuleType) -> Any:
    torch.set_deterministic_debug_mode("default")
    mesh = torch_target.mesh_of(module)
    model, optimizer = module.build(mesh)
    rows = torch.zeros(module.GLOBAL_BATCH, module.SEQ, dtype=torch.int64)
    batch = module.microbatches(mesh, rows, rows)
    return traffic.sent_by(lambda: module.train_step(model, optimizer, batch, LR), module.MESH)


def _program(text: str) -> Program:
    return lower(for_torch(resolve(Source("tiny.scale", text))))


def _filled(program: Program) -> float:
    """The least part of a flat buffer that parameters take."""
    params = {param.name: param for param in program.params}
    found = [1.0]
    for bucket in program.buckets:
        layers = prod(map(program.size, bucket.layers))
        taken = sum(program.elements(params[name].type) for name in bucket.params) // layers
        found.append(taken / layout_of(program, bucket).size)
    return min(found)


def _communicated(case: Case, folder: Path, traffic: Any) -> Beyond:
    """Records a step on gloo ranks, finds each collective of the plan in it, and returns what is
    beyond.

    Those of activations and stages are the same calls; flat buffers of a plan have padding to whole
    rows, at most 4% or what the smallest of them have, and what stages add to a norm is one sum for
    all of them.
    """
    text = plan_text(case)
    program = _program(text)
    ranks = run_ranks(
        case.ranks,
        _recorded,
        traffic,
        torch_target.load_torch_program(text, folder),
        functional=True,
    )
    beyond, filled = Beyond(), min(0.96, _filled(program))
    for rank, sent in enumerate(ranks):
        stage = rank * case.pp // case.ranks
        for row in traffic.compared(traffic.planned(program, stage), sent):
            assert row.bytes >= filled * row.bytes_planned - 8, (rank, row)
            beyond[row.op, row.axes] = row.beyond
        for use in ("activations", "stages"):
            calls = traffic.planned(program, stage, use)
            alone = type(calls)(
                {call: count for call, count in calls.items() if len(call.axes) == 1}
            )
            for call, count in traffic.as_torch(alone, sent).items():
                assert sent[call] >= count, (rank, call, count)
    return {key: count for key, count in beyond.items() if count}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "beyond"), COMMUNICATING, ids=["two axes", "zero 3"])
def test_torch_communicates_what_the_plan_says(
    case: Case, beyond: Beyond, tmp_path: Path, traffic: Any
) -> None:
    assert _communicated(case, tmp_path, traffic) == beyond


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in (*FEW, *MANY) if case.ranks <= 4], ids=str)
def test_torch_communicates_little_beyond_a_plan(case: Case, tmp_path: Path, traffic: Any) -> None:
    """Sums over ranks: of gradients, over several axes, and of norms.

    Where backward has two parts, torch recomputes layers for each, and communicates as they do; a
    dim that lies over two axes is gathered and summed over one after the other.
    """
    twice = case.recompute != "none" and case.schedule in ("zbv", "zb_h1", "zb_h2", "dualpipev")
    again = {"all_gather", "reduce_scatter", "send", "receive"} if twice else set[str]()
    in_turn = {call.op for call in traffic.planned(_program(plan_text(case))) if len(call.axes) > 1}
    assert {op for op, _ in _communicated(case, tmp_path, traffic)} <= {
        "all_reduce",
        *again,
        *in_turn,
    }


@pytest.mark.long
@pytest.mark.parametrize("state", test_fp16.STATES)
@pytest.mark.parametrize(("scale", "good"), [(2.0**10, 0), (2.0**10, 1997), (2.0**24, 0)])
def test_fp16_is_that_of_plain_torch(state: str, scale: float, good: int, tmp_path: Path) -> None:
    """With a loss scale that stays, one that grows and one that falls."""
    steps, loop = test_fp16.batches(12), test_fp16.Loop(test_fp16.initial(), scale, good)
    module = torch_target.load_torch_program(test_fp16.PLAN.format(state=state), tmp_path)
    for batch, seen in zip(
        steps, run_ranks(2, _scaled, module, steps, scale, good)[0], strict=True
    ):
        loss, norm = loop.step(batch)
        assert seen[:2] == (
            pytest.approx(loss, rel=1e-4),
            pytest.approx(norm, rel=1e-4, nan_ok=True),
        )
        assert seen[2:4] == (loop.scale, loop.good)
        for name, value in loop.masters.items():
            torch.testing.assert_close(seen[4][name], value, atol=5e-4, rtol=5e-4)


def _scaled(
    module: ModuleType, batches: list[harness.Inputs], scale: float, good: int
) -> list[tuple[Any, ...]]:
    """Loss, norm, the loss scale, steps since it changed, and parameters, after each step."""
    mesh = torch_target.mesh_of(module)
    model, optimizer = module.build(mesh)
    torch_target.fill(model, test_fp16.initial())
    _set_scale(optimizer, scale, good)
    return [_scaled_step(module, model, optimizer, mesh, batch) for batch in batches]


def _scaled_step(
    module: ModuleType, model: Any, optimizer: Any, mesh: Any, batch: harness.Inputs
) -> tuple[Any, ...]:
    metrics = module.train_step(model, optimizer, module.microbatches(mesh, *batch), test_fp16.LR)
    scale_and_steps = map(float, torch_ops.scale_and_steps(optimizer))
    return float(metrics.loss), float(metrics.norm), *scale_and_steps, torch_target.whole(model)


def _set_scale(optimizer: Any, scale: float, good: int) -> None:
    for own, value in zip(torch_ops.scale_and_steps(optimizer), (scale, good), strict=True):
        own.fill_(value)


@pytest.mark.long
@pytest.mark.parametrize("state", test_fp16.STATES)
def test_fp16_goes_on_from_a_checkpoint_to_the_last_bit(state: str, tmp_path: Path) -> None:
    """With a loss scale that grows in the step after it."""
    module = torch_target.load_torch_program(test_fp16.PLAN.format(state=state), tmp_path)
    for rank in run_ranks(
        2, _resumed, module, test_fp16.batches(2), str(tmp_path / "saved"), functional=True
    ):
        (*before, first), (*after, second) = rank
        assert before == after
        assert before[-2:] == [2.0**11, 0]
        assert all(torch.equal(first[name], second[name]) for name in first)


def _resumed(
    module: ModuleType, batches: list[harness.Inputs], folder: str
) -> list[tuple[Any, ...]]:
    """The second step without a pause, and from a checkpoint of the first, in a program that
    has done nothing else.
    """
    torch.set_deterministic_debug_mode("default")
    first, second = batches
    mesh = torch_target.mesh_of(module)
    model, optimizer = module.build(mesh)
    torch_target.fill(model, test_fp16.initial())
    _set_scale(optimizer, 2.0**10, 1998)
    _scaled_step(module, model, optimizer, mesh, first)
    torch_ops.save_checkpoint(model, optimizer, folder)
    undisturbed = _scaled_step(module, model, optimizer, mesh, second)
    model, optimizer = module.build(mesh)
    torch_ops.load_checkpoint(model, optimizer, folder)
    return [undisturbed, _scaled_step(module, model, optimizer, mesh, second)]


PARTED = """

def parted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y.cos(), (x.sin() * y).mean(-1)
"""


@pytest.mark.long
def test_user_ops_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    """From the same random values, which are those of any mesh; one op has several results."""
    (tmp_path / "my_ops.py").write_text((EXAMPLES / "my_ops.py").read_text() + PARTED)
    text = (
        (EXAMPLES / "05_user_op.scale").read_text().replace("seq = 64", "seq = 8  precision = fp64")
    )
    text = text.replace(
        "model own",
        'op parted(x[.., d], y[.., d]) -> [.., d], [..] over .. from "my_ops:parted"\nmodel own',
    )
    text = text.replace("    x = x + swiglu", "    p, q = parted(a, x)\n    x = x + p * q + swiglu")
    losses = list[list[float]]()
    for mesh, microbatch in (("dp = 1  tp = 1", 8), ("dp = 2  tp = 2", 4)):
        (tmp_path / "own.scale").write_text(
            text.replace("dp = 2  tp = 2", mesh).replace(
                "microbatch = 4", f"microbatch = {microbatch}"
            )
        )
        module = torch_target.of_file(tmp_path / "own.scale", tmp_path / f"out_{microbatch}")
        losses += [run_ranks(4 if microbatch == 4 else 1, _losses, module)[0]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0][-1] < losses[0][0]


def _losses(module: ModuleType) -> list[float]:
    torch.manual_seed(0)
    torch.set_deterministic_debug_mode("default")
    mesh = torch_target.mesh_of(module)
    model, optimizer = module.build(mesh)
    rows = torch.randint(
        256, (module.GLOBAL_BATCH, module.SEQ + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = module.microbatches(mesh, rows[:, :-1], rows[:, 1:])
    return [float(module.train_step(model, optimizer, batch, LR).loss) for _ in range(3)]


def test_weights_go_from_one_program_to_the_other(tmp_path: Path) -> None:
    """Under Hugging Face's names: two sharded ranks of torch alone write them, two of the
    runtime read them.
    """
    ours, theirs = _tiny("dp = 1  tp = 2", ""), _tiny("dp = 2  tp = 1", "state { zero 3 over dp }")
    folder = write_program(ours, tmp_path / "runtime", str(PLANS / "variant.scale"))
    module = torch_target.load_torch_program(
        theirs, tmp_path / "torch", str(PLANS / "variant.scale")
    )
    losses = run_ranks(2, _written_loss, module, str(tmp_path / "weights"), functional=True)
    assert (
        run_ranks(2, _read_loss, import_module(folder / "train.py"), tmp_path / "weights")
        == [pytest.approx(losses[0], rel=1e-5)] * 2
    )


@pytest.mark.long
def test_weights_of_stages_are_those_of_any_mesh(tmp_path: Path) -> None:
    """Random ones, and those that two ranks with two stages each write for one process of the
    runtime.
    """
    sizes = "train { seq = 16  global_batch = 4  microbatch = 1 }"
    texts = {
        "staged": f'use "tiny_pipeline.scale" {{ {sizes} }}\nmesh {{ pp = 2  dp = 1  tp = 1'
        f" }}\nstate {{ }}\n",
        "whole": f'use "tiny_llama.scale" {{ dims {{ layers = 4 }}  {sizes} }}\nmesh {{ dp = 1  tp'
        f" = 1 }}\n",
    }
    at = str(PLANS / "variant.scale")
    staged, whole = (
        torch_target.load_torch_program(text, tmp_path / name, at) for name, text in texts.items()
    )
    (loss,) = run_ranks(1, _written_loss, whole, str(tmp_path / "of_one"), functional=True)
    losses = run_ranks(2, _written_loss, staged, str(tmp_path / "of_two"), functional=True)
    assert losses == [pytest.approx(loss, rel=1e-6)] * 2
    folder = write_program(texts["whole"], tmp_path / "runtime", at)
    (read,) = run_ranks(1, _read_loss, import_module(folder / "train.py"), tmp_path / "of_two")
    assert read == pytest.approx(loss, rel=1e-5)


def _tiny(mesh: str, state: str) -> str:
    sizes = "train { seq = 16  global_batch = 4  microbatch = 1 }"
    return f'use "tiny_llama.scale" {{ {sizes} }}\nmesh {{ {mesh} }}\n{state}\n'


def _rows(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(seed))
    return rows[:, :-1], rows[:, 1:]


def _written_loss(module: ModuleType, folder: str) -> float:
    """The loss of random weights, which are written, forgotten and read once more."""
    torch.set_deterministic_debug_mode("default")
    torch.manual_seed(3)
    mesh = torch_target.mesh_of(module)
    model, _ = module.build(mesh)
    batch = module.microbatches(mesh, *_rows())
    before = float(module.eval_step(model, batch).loss)
    torch.manual_seed(3)
    torch_ops.save_weights(module.build(mesh)[0], module.NAMES, folder)
    other, _ = module.build(mesh)
    torch_ops.load_weights(other, module.NAMES, folder)
    assert float(module.eval_step(other, batch).loss) == before
    return before


def _read_loss(module: ModuleType, folder: Path) -> float:
    model, state = module.build(Mesh(module.PLAN.mesh))
    Reader(folder, module.PLAN.names).fill(state)
    return float(module.eval_step(model, state, harness.local_batch(module.PLAN, *_rows())).loss)
