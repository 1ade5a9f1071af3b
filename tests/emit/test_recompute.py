"""Recomputed values in plans where they are easily mistaken: read back, refused if they are others,
and exact.

Each plan is of one mistake that the compiler once made of it.  Non-goals: what is saved
(`tests/analysis/memory`).
"""

from math import prod
from pathlib import Path

import pytest
import torch
from attrs import evolve

from helpers.oracle import harness
from helpers.oracle.plans import Case
from helpers.oracle.reference import Step
from helpers.programs import get_train_py, load_program
from helpers.readback_plans import LOSS, MLP, START, plan
from scalec.compiler.emit.readback import check
from scalec.compiler.ir import Op, Program, Region, blocks

MEANS = "a = mean(x, over=[hidden])  b = tanh(mean(x, over=[hidden]))  x = x * a + x * b"
DRAWN = (
    "repeat layers { x = x + dropout(x, 0.1) * tanh(x) } repeat layers { x = x + dropout(x,"
    " 0.2) * silu(x) }"
)
HALVES = "x = silu((x * 0.5) @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden] + x * 0.5"
CAPTURED = "repeat blocks { x = x + tanh(y) * silu(x) } repeat blocks { x = tanh(y) * relu(x) + x }"
PARTS = f"repeat blocks as i {{ if i < 1 {{ x = x + tanh(x) }} else {{ {MLP} }} }}"
NAMED = "enabled = silu(x) repeat layers { enabled = enabled + tanh(enabled) } x = x + enabled"
PLANS = {
    "a sum": (
        f"repeat layers {{ {MLP} x = x + x * tanh(sum(x, over=[hidden])) }}",
        "selective(sum)",
    ),
    "a sum of a product": (
        f"repeat layers {{ {MLP} x = x + x * tanh(sum(x * x, over=[hidden])) }}",
        "selective(sum)",
    ),
    "equal ops, each in its block": (f"repeat layers {{ {MLP} {MEANS} }}", "selective(mean)"),
    "draws of two repeats": (DRAWN, "full"),
    "equal ops, one of them behind all that is kept": (f"repeat layers {{ {HALVES} }}", "full"),
    "equal ops of two repeats in one line": (f"y = silu(x) {CAPTURED}", "full"),
    "every other layer of two repeats": (DRAWN, "every(2, layers)"),
    "every other layer of each part": (PARTS, "every(2, blocks)"),
    "a value with the name of the loop's variable": (NAMED, "every(2, layers)"),
}


def _plan(name: str, recompute: str = "") -> str:
    """On one rank."""
    body, again = PLANS[name]
    return plan(
        f"{START} {body} {LOSS}", "", "", f"precision = fp64  recompute = {recompute or again}"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_done_again_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """`harness` emits, which reads back."""
    kept, again = (
        _step(_plan(name, "none"), tmp_path / "none"),
        _step(_plan(name), tmp_path / "again"),
    )
    assert kept.loss == again.loss
    assert kept.gradients.keys() == again.gradients.keys()
    assert all(torch.equal(kept.gradients[key], again.gradients[key]) for key in kept.gradients)
    assert any(gradient.any() for gradient in kept.gradients.values())


def _step(text: str, folder: Path) -> Step:
    module = load_program(text, folder)
    sizes = [
        (module.PLAN.global_batch, module.PLAN.seq)[: len(given.dims)]
        for given in module.PLAN.inputs.values()
    ]
    inputs = tuple(torch.arange(prod(size)).view(size) % (7 + i) for i, size in enumerate(sizes))
    (step,) = harness.run(Case(), module, harness.initial(Case(), module, seed=5), [inputs], 0.1)
    return step


OTHERWISE = {
    # plan, a line, what stands there instead
    "another function": ("a sum", "recompute(torch.sum, ", "recompute(mean, "),
    "another dim": ("a sum", "recompute(torch.sum, x, dim=2)", "recompute(torch.sum, x, dim=1)"),
    "a function that is not torch's": ("a sum", "recompute(torch.sum, ", "recompute(nn.sum, "),
    "no function": ("a sum", "recompute(torch.sum, ", "recompute(x.sum, "),
    "an equal op that is kept": (
        "equal ops, each in its block",
        "with recompute(mean, x, dim=2, size=32) as a:",
        "if (a := mean(x, dim=2, size=32)) is not None:",
    ),
    "what an equal op gives in a block that is left": (
        "equal ops, each in its block",
        "a.unsqueeze(2)",
        "mean_",
    ),
    "layers that are kept": (
        "draws of two repeats",
        "recomputed(layer, x, draws)",
        "layer(x, draws)",
    ),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_another_program_is_refused(what: str) -> None:
    name, old, new = OTHERWISE[what]
    text, program = get_train_py(_plan(name), "again.scale")
    assert old in text
    with pytest.raises(AssertionError, match=r"emit: line \d+: "):
        check(text.replace(old, new, 1), program)


@pytest.mark.parametrize("times", [2, 3])
def test_as_many_equal_ops_are_done_again_as_the_ir_says(times: int) -> None:
    """Once: the first of two in forward."""
    text, program = get_train_py(
        _plan("equal ops, one of them behind all that is kept"), "again.scale"
    )
    assert check(text, program)
    with pytest.raises(AssertionError, match="in the IR, backward recomputes other ops"):
        check(text, _with_first_done(program, times))


def _with_first_done(program: Program, times: int) -> Program:
    """The program whose backward does so many times what it does again first."""
    region, (forward, backward) = program.microbatches, blocks(program.microbatches)
    (repeat,) = (stmt for stmt in backward.body if isinstance(stmt, Region))
    first = next(
        stmt
        for stmt in repeat.body
        if isinstance(stmt, Op) and stmt.outputs[0].name.startswith("_y")
    )
    copies = [
        evolve(first, outputs=(evolve(first.outputs[0], name=f"_other.{i}"),))
        for i in range(times - 1)
    ]
    longer = evolve(repeat, body=(*copies, *repeat.body))
    backward = evolve(
        backward, body=tuple(longer if stmt is repeat else stmt for stmt in backward.body)
    )
    longer = evolve(region, body=(forward, backward))
    step = tuple(longer if stmt is region else stmt for stmt in program.region.body)
    return evolve(program, region=evolve(program.region, body=step))
