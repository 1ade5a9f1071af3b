"""Models of every shape in stages against the same models whole, in float64: each step, and
evaluation.

What crosses is one value or several, at all cuts the same or not; what stands between the repeats
that are cut are ops or a repeat that is not; and some stages have no layers.  Non-goals: schedules
(`test_pipelines`), and numbers, to which whole programs are held.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from helpers import uneven_stages
from helpers.oracle import harness
from helpers.oracle.plans import ROWS, SEQ, Case
from helpers.oracle.reference import random_parameters
from helpers.programs import load_program

LR, STEPS, TOLERANCE = 0.1, 2, 1e-10
DRAWS = [[3, -5, 2**62, -(2**63), 7, 1, 0, 9], [11, 4, 2**40, -1, 8, 6, 2, 5]]
"""Of each step, by row."""

START = "x = embedding(tokens, wte[vocab, hidden])"
MIXED = (
    "a = rmsnorm(x, norm1[hidden], 1e-5)  x = x + tanh(a @ w_in[hidden -> ffn]) @ w_out[ffn ->"
    " hidden]"
)
MIXED_AGAIN = (
    "m = rmsnorm(x, norm2[hidden], 1e-5)  x = x + silu(m @ w_up[hidden -> ffn]) @ w_down[ffn"
    " -> hidden]"
)
BLOCKS = f"repeat blocks {{ {MIXED} }}"
LAYERS = f"repeat layers {{ {MIXED_AGAIN} }}"
LAYERS_OF_S = "repeat layers { s = s + silu(s @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden] }"
DROPPED = "x = dropout(x, 0.2)"
NARROWED = "y = x @ p[hidden -> narrow]"
LAYERS_OF_Y = "repeat layers { y = y + tanh(y @ w_up[narrow -> ffn]) @ w_down[ffn -> narrow] }"
REST_OF_Z = "repeat rest { z = z + silu(z * g[hidden]) }"
LOSS_OF_Y = "loss = cross_entropy(y @ head[narrow -> vocab], labels)"
LOSS = "loss = cross_entropy(x @ head[hidden -> vocab], labels)"
TIED = "loss = cross_entropy(x @ wte, labels)"

MODELS = {
    "skip": f"{START} s = silu(x) {BLOCKS} x = x + s {LOSS}",
    "skip, two repeats": f"{START} s = silu(x) {BLOCKS} s = s * x {LAYERS} x = x + s {LOSS}",
    "skip from the middle": (
        f"{START} s = tanh(x) {BLOCKS} x = x * s s = x {LAYERS} x = x * s {TIED}"
    ),
    "two carried": f"{START} s = silu(x) repeat blocks {{ {MIXED} s = s + x }} x = x * s {LOSS}",
    "swapped": f"{START} s = silu(x) {BLOCKS} {LAYERS_OF_S} x = x + s {LOSS}",
    "one name for two": f"{START} s = x x = silu(x) {BLOCKS} x = x + s {LOSS}",
    "captured": (
        f"{START} y = silu(gate[hidden]) repeat blocks {{ {MIXED} x = x * y + gate }} {LOSS}"
    ),
    "ops between": f"{START} {BLOCKS} x = silu(x) * gate[hidden] {LAYERS} {TIED}",
    "nothing between": f"{START} {BLOCKS} {LAYERS} {TIED}",
    "whole before": f"{START} {LAYERS} {BLOCKS} {TIED}",
    "whole behind": f"{START} {BLOCKS} {LAYERS} {TIED}",
    "dropped": f"{START} {DROPPED} repeat blocks {{ {MIXED} {DROPPED} }} {DROPPED}"
    f" repeat layers {{ {MIXED_AGAIN} {DROPPED} }} {DROPPED} {TIED}",
    "dropped, one whole": f"{START} repeat layers {{ {MIXED_AGAIN} {DROPPED} }} {DROPPED}"
    f" repeat blocks {{ {MIXED} {DROPPED} }} {LOSS}",
    "names": f"{START} stage = silu(x) i = tanh(x) carried = i * x repeat blocks {{ {MIXED} x = x +"
    f" i }}"
    f" x = x + i + stage + carried {LOSS}",
    "another width": f"{START} {BLOCKS} {NARROWED} {LAYERS_OF_Y} {LOSS_OF_Y}",
    "fewer later": (
        f"{START} s = silu(x) repeat blocks {{ {MIXED} x = x * s }} x = x + s {LAYERS} {TIED}"
    ),
    "more later": (
        f"{START} {BLOCKS} s = tanh(x) repeat layers {{ {MIXED_AGAIN} x = x + s }} x = x * s {TIED}"
    ),
    "others later": f"{START} s = silu(x) {BLOCKS} {NARROWED} z = x * s"
    f" repeat layers {{ y = y + tanh((y @ w_up[narrow -> ffn]) + (z @ w_in2[hidden -> ffn])) @"
    f" w_down[ffn -> narrow] }}"
    f" {LOSS_OF_Y}",
    "three": f"{START} s = tanh(x) {BLOCKS} {NARROWED} repeat layers {{ y = silu(y) }}"
    f" z = s * (y @ q[narrow -> hidden]) {REST_OF_Z} x = z {TIED}",
    "read by layers alone": f"{START} s = silu(x) repeat blocks {{ {MIXED} x = x * s }} {LOSS}",
}
CASES = {
    # model: dims that are cut, schedules and stages, options
    "skip": ("blocks", "1f1b", ""),
    "skip, two repeats": ("blocks, layers", "interleaved_1f1b(chunks=2)", ""),
    "skip from the middle": ("blocks, layers", "zbv", ""),
    "two carried": ("blocks", "zb_h1", "recompute = full"),
    "swapped": ("blocks, layers", "1f1b", "recompute = every(2, blocks)"),
    "one name for two": ("blocks", "zb_h2", ""),
    "captured": ("blocks", "interleaved_1f1b(chunks=2)  stages = [2, 1, 1, 0]", ""),
    "ops between": ("blocks, layers", "1f1b", "recompute = selective(silu, rmsnorm)"),
    "nothing between": ("blocks, layers", "interleaved_1f1b(chunks=2)  stages = [0, 4, 2, 0]", ""),
    "whole before": ("blocks", "1f1b", ""),
    "whole behind": ("blocks", "zbv", ""),
    "dropped": ("blocks, layers", "interleaved_1f1b(chunks=2)", "recompute = full"),
    "dropped, one whole": ("blocks", "1f1b", ""),
    "names": ("blocks", "1f1b", ""),
    "another width": ("blocks, layers", "interleaved_1f1b(chunks=2)", "recompute = full"),
    "fewer later": ("blocks, layers", "interleaved_1f1b(chunks=2)  stages = [1, 1, 2, 2]", ""),
    "more later": ("blocks, layers", "zbv  stages = [1, 2, 2, 1]", "recompute = every(2, layers)"),
    "others later": (
        "blocks, layers",
        "interleaved_zero_bubble(chunks=2)  stages = [1, 3, 1, 1]",
        "",
    ),
    "three": ("blocks, layers, rest", "breadth_first(chunks=3)", ""),
    "read by layers alone": ("blocks", "interleaved_1f1b(chunks=2)  stages = [1, 2, 1, 0]", ""),
}
WHOLE, STAGED = Case(microbatches=4), Case(pp=2, microbatches=4)


def plan_of(model: str, cut: str = "", schedule: str = "", options: str = "") -> str:
    return f"""model parts(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 32  hidden = 8  ffn = 12  narrow = 6  blocks = 4  layers = 2  rest = 3 }}  init ~ normal(0.02)
  {model}
}}
mesh  {{ {"pp = 2" if cut else ""} }}
shard {{ {f"{cut} over pp" if cut else ""} }}
{f"pipeline {{ schedule = {schedule} }}" if cut else ""}
train {{
  seq = {SEQ}  global_batch = {WHOLE.rows}  microbatch = {ROWS}  steps = {STEPS}  precision = fp64  {options}
  optimizer sgd {{ lr = {LR} }}  data text {{ files = [python_stdlib] }}
}}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_stages_do_what_the_whole_does(name: str, tmp_path: Path) -> None:
    cut, schedule, options = CASES[name]
    texts = plan_of(MODELS[name]), plan_of(MODELS[name], cut, schedule, options)
    _same_steps(texts, STAGED, [*batches_of(name)], tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", [uneven_stages.CHUNKS, "zbv  stages = [2, 2, 2, 1]"])
def test_other_placements_at_other_cuts(schedule: str, tmp_path: Path) -> None:
    """Sharded by the sequence, then by features, then by the sequence again, of which the model
    has others.
    """
    texts = (
        uneven_stages.unlike(case=uneven_stages.WHOLE),
        uneven_stages.unlike(schedule, "recompute = every(2, layers)"),
    )
    ids = torch.arange(SEQ) // torch.tensor([3, 5, 8, 2] * (uneven_stages.WHOLE.rows // 4))[:, None]
    _same_steps(
        texts,
        uneven_stages.STAGED,
        [(*inputs, ids) for inputs in harness.batches(WHOLE, STEPS)],
        tmp_path,
    )


def _same_steps(
    texts: tuple[str, str], case: Case, batches: list[tuple[Tensor, ...]], folder: Path
) -> None:
    """Two plans do the same: one of the whole model, and one on the ranks of a case."""
    whole, staged = (
        module_of(text, folder / name)
        for text, name in zip(texts, ("whole", "staged"), strict=True)
    )
    start = random_parameters(harness.initial(WHOLE, whole, seed=5), 1 / 4)
    got, want = (
        harness.run(it, module, start, batches, LR)
        for it, module in ((case, staged), (WHOLE, whole))
    )
    for one, other in zip(got, want, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=TOLERANCE, abs=0)
        assert one.norm == pytest.approx(other.norm, rel=TOLERANCE, abs=0)
        assert one.gradients.keys() == other.gradients.keys()
        for key, gradient in other.gradients.items():
            torch.testing.assert_close(one.gradients[key], gradient, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(
                one.parameters[key], other.parameters[key], rtol=0, atol=TOLERANCE
            )
    (loss,) = harness.evaluate(WHOLE, whole, start, batches[0])
    assert (
        harness.evaluate(case, staged, start, batches[0])
        == [pytest.approx(loss, rel=TOLERANCE)] * case.ranks
    )


def module_of(text: str, folder: Path) -> ModuleType:
    return load_program(text, folder)


def batches_of(name: str) -> Iterator[tuple[Tensor, ...]]:
    for inputs, draws in zip(harness.batches(WHOLE, STEPS), DRAWS, strict=True):
        yield (*inputs, torch.tensor(draws)) if "dropout" in MODELS[name] else inputs
