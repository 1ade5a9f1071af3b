"""Programs whose layers torch.compile makes graphs of, against the reference in float64; and who
declines that.

All but one are compiled by AOTAutograd without inductor, which takes a tenth of the time and has
the same graphs.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.compare import assert_same
from helpers.oracle.plans import Case, plan_text
from helpers.oracle.reference import Tensors
from scalec import runtime as rt
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Axis, Mesh, compile_each
from scalec.runtime.debug import twice

LR, STEPS = 0.01, 2
COMPILED = partial(Case, compile="on", optimizer="adamw", clip=0.05)
CASES = [
    COMPILED(tp=2, sp=True, microbatches=2),
    COMPILED(tp=2, recompute="full", model="tied"),
    COMPILED(dp=2, state="zero 3 over dp", microbatches=2, recompute="full"),
    COMPILED(pp=2, microbatches=2, layers=4, recompute="every(2, layers)"),
    pytest.param(
        COMPILED(dp=2, tp=2, sp=True, microbatches=2, state="zero 3 over dp", kernels="triton"),
        marks=pytest.mark.long,
    ),
]
INDUCTOR = Path(sysconfig.get_path("include"), "Python.h").exists() and (
    which("g++") or which("clang++")
)


COERCIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "replicate": rt.replicate,
    "all_reduce": rt.all_reduce,
    "the maximum": lambda x, axis: x * rt.all_reduce(x, axis, op="max"),
    "all_gather": partial(rt.all_gather, dim=1),
    "all_gather of one row": lambda x, axis: rt.all_gather(x[:1], axis, dim=1),
    "reduce_scatter": partial(rt.reduce_scatter, dim=0),
    "reduce_scatter of one row": lambda x, axis: rt.reduce_scatter(x[:1], axis, dim=1),
    "all_gather_invariant": partial(rt.all_gather_invariant, dim=0),
    "shard": partial(rt.shard, dim=1),
    "take_shard": partial(rt.take_shard, dim=0),
    "pad_shard": partial(rt.pad_shard, dim=1),
    "all_to_all": partial(rt.all_to_all, dim_from=1, dim_to=0),
    "once": rt.once,
    "invariant": rt.invariant,
    "once_replicated": rt.once_replicated,
}


def _all_coerced(x: Tensor, axis: Axis) -> Tensor:
    return torch.stack([(coercion(x * x, axis) ** 3).sum() for coercion in COERCIONS.values()])


def _compiled_and_not(_: None) -> list[tuple[Tensor, Tensor]]:
    """The sum of each coercion's cubes, and its gradient: as they are, and in one graph."""
    axis = Mesh({"tp": 2}).axis("tp")
    start = torch.randn(
        4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(axis.rank)
    )
    results: list[tuple[Tensor, Tensor]] = []
    for function in (
        _all_coerced,
        torch.compile(_all_coerced, backend="aot_eager", fullgraph=True),
    ):
        x = start.clone().requires_grad_()
        sums = function(x, axis)
        gradients = [torch.autograd.grad(each, x, retain_graph=True)[0] for each in sums]
        results.append((sums.detach(), torch.stack(gradients)))
    return results


@pytest.mark.long
def test_every_coercion_is_the_same_in_a_graph() -> None:
    for eager, compiled in run_ranks(2, _compiled_and_not, None, functional=True):
        for name, *pairs in zip(COERCIONS, *eager, *compiled, strict=True):
            sums, gradients = pairs[::2], pairs[1::2]
            torch.testing.assert_close(*sums, rtol=1e-12, atol=0, msg=name)
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=0, msg=f"gradient of {name}")


def _train(
    module: ModuleType, start: Tensors, batches: list[harness.Inputs]
) -> tuple[list[harness.RankStep], Any]:
    """A rank's steps, and what of the program dynamo could not put into a graph."""
    counters.clear()
    steps = harness._train(module, start, batches, LR)
    assert counters["stats"]["unique_graphs"], "nothing is compiled"
    return steps, dict(counters["graph_break"])


def _compare(case: Case, folder: Path, backend: str) -> None:
    module: Any = harness.load_case(case, folder)
    module.compile_each = partial(compile_each, backend=backend)
    start, batches = reference.initial(case.config), list(harness.batches(case, STEPS))
    expected = reference.run(case.config, case.training, start, batches, LR)
    results = run_ranks(case.ranks, _train, module, start, batches, functional=True)
    steps, breaks = zip(*results, strict=True)
    assert not any(breaks), breaks
    for number, (got, want) in enumerate(zip(zip(*steps, strict=True), expected, strict=True)):
        assert_same(harness._joined(got, start), want, f"step {number}: ")


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    _compare(case, tmp_path, "aot_eager")


@pytest.mark.long
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="inductor of 2.11 takes float64 attention's sums for float32"
)
@pytest.mark.skipif(not INDUCTOR, reason="inductor needs a C++ compiler and Python's headers")
def test_two_steps_by_inductor_equal_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    _compare(replace(CASES[0], kernels="triton"), tmp_path, "inductor")


@pytest.mark.parametrize("observer", ["SCALEC_SANITIZE", "SCALEC_RECORD"])
def test_where_layers_are_looked_into_none_is_compiled(
    observer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(observer, "1")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    compile_each(model, torch.nn.Linear)
    assert model[0]._compiled_call_impl is None
    assert (
        capsys.readouterr().err
        == f"note: {observer}=1 looks into each layer, so none is compiled\n"
    )


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_graphs_tell_their_results_to_a_step_that_is_run_twice() -> None:
    """Whether they are made under its eyes or before, and to nobody afterwards; they are not
    made anew for that.
    """
    counters.clear()
    model = torch.nn.Sequential(_Layer(), torch.nn.ReLU())
    compile_each(model, _Layer, backend="eager")
    told, x = list[tuple[str, Tensor]](), torch.ones(1, 2)
    for _ in range(2):
        with twice.telling(model, lambda name, made: told.append((name, made))):
            model(x)
        assert [name for name, _ in told] == ["0", "1"]
        assert torch.equal(told[0][1], model[0](x))
        told.clear()
    model(x)
    assert not told
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("case", "place"),
    [
        (COMPILED(recompute="selective(attention)"), "recompute = selective(attention)"),
        (COMPILED(tp=2, sp=True, gathered="regather"), "gathered = regather"),
        (COMPILED(pp=2, microbatches=4, schedule="zb_h1"), "schedule = zb_h1"),
    ],
    ids=str,
)
def test_what_a_compiled_layer_does_not_have_is_refused(case: Case, place: str) -> None:
    with pytest.raises(PlanError) as raised:
        compile_plan(Source("tiny.scale", plan_text(case)))
    (found,) = raised.value.diagnostics
    line = found.span.text.splitlines()[found.span.line - 1]
    assert (found.code, line[found.span.column - 1 : found.span.end_column - 1]) == ("E0412", place)
    assert [note.text for note in found.notes] == ["layers are compiled"]
