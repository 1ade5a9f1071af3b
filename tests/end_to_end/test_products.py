"""Programs whose layers make one product with several weights, however state lies: how many
products there are, and the same numbers as one process.

The reference is plain torch in float64, with a product for each weight.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from helpers.counted_products import products
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.compare import assert_same
from helpers.oracle.plans import Case
from helpers.oracle.reference import Tensors
from scalec.runtime import compile_each

FUSED = partial(Case, kernels="triton", microbatches=2, optimizer="adamw", clip=0.05)
STAGES = partial(FUSED, pp=2, dp=2, layers=4)
CASES = [
    FUSED(tp=2, sp=True, state="bucket = 1KiB"),
    FUSED(dp=2, kv=4),
    FUSED(dp=2, state="zero 1 over dp"),
    FUSED(dp=2, state="zero 1 over dp  bucket = 1KiB"),
    FUSED(dp=2, state="zero 2 over dp"),
    FUSED(dp=2, tp=2, state="zero 3 over dp", recompute="full"),
    FUSED(dp=2, state="zero 3 over dp  bucket = 1KiB  prefetch = 2"),
    STAGES(),
    STAGES(state="zero 1 over dp"),
    STAGES(state="zero 2 over dp", schedule="interleaved_1f1b(chunks=2)"),
    STAGES(state="zero 3 over dp", schedule="interleaved_1f1b(chunks=2)"),
    STAGES(state="zero 1 over dp  bucket = 1KiB", schedule="zb_h1", microbatches=3),
    STAGES(state="zero 3 over dp", schedule="zbv", microbatches=4, model="tied"),
]
COMPILED = [
    FUSED(tp=2, sp=True, compile="on"),
    FUSED(dp=2, state="zero 3 over dp", compile="on"),
    FUSED(pp=2, layers=4, compile="on"),
    pytest.param(STAGES(state="zero 3 over dp", compile="on"), marks=pytest.mark.long),
]
LR, STEPS = 0.01, 2


def _counted(function: Callable[..., Any], counts: Counter[int]) -> Callable[..., Any]:
    """The function, each of whose calls counts its products."""

    def counting(*args: Any, **options: Any) -> Any:
        with products() as found:
            result = function(*args, **options)
        counts[len(found)] += 1
        return result

    return counting


def _train(
    module: Any, start: Tensors, batches: list[harness.Inputs]
) -> tuple[list[harness.RankStep], Counter[int], Counter[int]]:
    """A rank's steps, and how many calls of `fused_linear` made how many products, forward and
    backward.
    """
    forward, backward = Counter[int](), Counter[int]()
    module.fused_linear = _counted(module.fused_linear, forward)
    function: Any = import_module("scalec.runtime.ops.fused_linear")._Linears
    function.backward = staticmethod(_counted(function.backward, backward))
    return harness._train(module, start, batches, LR), forward, backward


def _compare(
    case: Case, steps: Sequence[Sequence[harness.RankStep]], start: Tensors, batches: list[Any]
) -> None:
    expected = reference.run(case.config, case.training, start, batches, LR)
    for number, (got, want) in enumerate(zip(zip(*steps, strict=True), expected, strict=True)):
        assert_same(harness._joined(got, start), want, f"step {number}: ")


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_layer_is_one_product_forward_and_two_backward(case: Case, tmp_path: Path) -> None:
    """Where weight parts of backward come later, one is left; queries as wide as keys are not
    copied together.
    """
    module = harness.load_case(case, tmp_path)
    start, batches = reference.initial(case.config), list(harness.batches(case, STEPS))
    steps, forward, backward = zip(
        *run_ranks(case.ranks, _train, module, start, batches), strict=True
    )
    _compare(case, steps, start, batches)
    layers = STEPS * case.microbatches * case.layers * case.ranks // case.pp
    assert sum(forward, Counter[int]()) == {1: 2 * layers * (2 if case.recompute == "full" else 1)}
    expected = {1: 2 * layers} if case.schedule.startswith("z") else {2: 2 * layers}
    expected = {2: layers, 6: layers} if case.kv == case.config.heads else expected
    assert sum(backward, Counter[int]()) == expected


def _train_compiled(
    module: Any, start: Tensors, batches: list[harness.Inputs]
) -> tuple[Any, list[list[int]]]:
    """A rank's steps, and of each graph of a forward the columns of its products' results."""
    graphs: list[list[int]] = []

    def keep(graph: Any, _: object) -> Any:
        graphs.append(
            [
                node.meta["val"].shape[1]
                for node in graph.graph.nodes
                if "aten.mm" in str(node.target)
            ]
        )
        return make_boxed_func(graph)

    backend: Any = aot_autograd(
        fw_compiler=keep, bw_compiler=lambda graph, _: make_boxed_func(graph)
    )
    module.compile_each = partial(compile_each, backend=backend)
    return harness._train(module, start, batches, LR), graphs


@pytest.mark.long
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_in_a_graph_each_layer_is_one_product_too(case: Case, tmp_path: Path) -> None:
    """One graph serves all layers."""
    module = harness.load_case(case, tmp_path)
    start, batches = reference.initial(case.config), list(harness.batches(case, STEPS))
    steps, found = zip(*run_ranks(case.ranks, _train_compiled, module, start, batches), strict=True)
    _compare(case, steps, start, batches)
    hidden, heads, ffn = (
        size // case.tp for size in (case.config.hidden, case.config.heads, case.config.ffn)
    )
    together = hidden + 2 * case.kv * (hidden // heads) // case.tp
    assert [*found] == [[[together, case.config.hidden, 2 * ffn, case.config.hidden]]] * case.ranks
