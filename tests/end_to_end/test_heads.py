"""Heads of every kind against plain torch in one process, in float64: each step's loss, gradients
and parameters.

A bias that goes into the product with its loss, logits that stand apart from it, a cap of either;
of a vocabulary that is whole or shared out, with padding and labels that do not count, in stages
whose weights' gradients are put off.  Non-goals: what the rest of a model is (`test_numbers`,
`test_models`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from helpers.oracle import harness
from helpers.oracle.compare import assert_same
from helpers.oracle.plans import Case, train_text
from helpers.oracle.reference import Tensors, random_parameters, train
from helpers.programs import load_program
from helpers.reference_ops import cross_entropy
from scalec.compiler.ir import walk
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

LR, STEPS, LAYERS = 0.1, 2, 4

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits and labels."""


def of_two(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, z=0.01) + cross_entropy(
        logits, labels, cap=2, smoothing=0.1
    )


@frozen
class Head:
    """A head as a plan says it, and as torch does; the ops that it becomes, where ranks have the
    whole vocabulary, and where they share it out.
    """

    text: str
    logits: Callable[[Tensors, Tensor], Tensor]
    loss: Loss
    whole: str
    parts: str


HEADS = {
    "bias": Head(
        "loss = cross_entropy(x @ head[hidden -> vocab] + b[vocab], labels, smoothing=0.1, z=0.01)",
        lambda p, x: F.linear(x, p["head"], p["b"]),
        partial(cross_entropy, smoothing=0.1, z=0.01),
        "linear_cross_entropy",
        "linear_softmax_stats",
    ),
    "tied, with a bias, capped": Head(
        "loss = cross_entropy(softcap(x @ wte + b[vocab], 2), labels)",
        lambda p, x: F.linear(x, p["wte"], p["b"]),
        partial(cross_entropy, cap=2),
        "linear_cross_entropy",
        "linear_softmax_stats",
    ),
    "a function of logits, capped": Head(
        "loss = cross_entropy(softcap(tanh(x @ wte + b[vocab]), 2), labels, smoothing=0.1)",
        lambda p, x: F.linear(x, p["wte"], p["b"]).tanh(),
        partial(cross_entropy, cap=2, smoothing=0.1),
        "cross_entropy",
        "logit_softmax_stats",
    ),
    "two losses": Head(
        "y = x @ head[hidden -> vocab] + b[vocab]"
        " loss = cross_entropy(y, labels, z=0.01) + cross_entropy(softcap(y, 2), labels,"
        " smoothing=0.1)",
        lambda p, x: F.linear(x, p["head"], p["b"]),
        of_two,
        "cross_entropy",
        "logit_softmax_stats",
    ),
}

PLAIN = Case(kernels="triton", padded=True)
CASES = (
    replace(PLAIN, microbatches=3, optimizer="momentum"),
    replace(PLAIN, dp=2, tp=2, sp=True, microbatches=2, state="zero 3 over dp", clip=0.05),
    replace(
        PLAIN, tp=4, valid="silent_microbatch", microbatches=2, gathered="regather", padded=False
    ),
    replace(PLAIN, dp=2, tp=2, vocab=False, optimizer="adamw", recompute="full"),
    replace(PLAIN, pp=2, tp=2, dp=2, microbatches=4, schedule="zb_h1", state="zero 1 over dp"),
    replace(PLAIN, pp=2, dp=2, vocab=False, microbatches=4, schedule="zbv"),
)
"""The vocabulary is shared out where `vocab` and an axis tp say so."""


def plan_text(head: Head, case: Case) -> str:
    vocab, seq = "vocab, " if case.vocab and case.tp > 1 else "", "seq over tp" if case.sp else ""
    size = "29 pad 4" if case.padded else "32"
    tensor = f"{vocab}ffn over tp  {seq}" if case.tp > 1 else ""
    return f"""model heads(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = {size}  hidden = 8  ffn = 12  layers = {LAYERS} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{ x = x + tanh(x @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden] }}
  {head.text}
}}
mesh {{ {f"pp = {case.pp}" if case.pp > 1 else ""}  dp = {case.dp}  {f"tp = {case.tp}" if case.tp > 1 else ""} }}
shard {{ batch over dp  {tensor}  {"layers over pp" if case.pp > 1 else ""} }}
state {{ {case.state} }}
{f"pipeline {{ schedule = {case.schedule} }}" if case.pp > 1 else ""}
{train_text(case)}"""


def total(head: Head, classes: int, p: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of all tokens; the classes behind the first are padding."""
    x = p["wte"][tokens]
    for i in range(LAYERS):
        x = x + (x @ p[f"layers.{i}.w_up"].T).tanh() @ p[f"layers.{i}.w_down"].T
    return head.loss(head.logits(p, x)[..., :classes], labels)


FEW = [
    ("bias", CASES[0]),
    ("bias", CASES[1]),
    ("tied, with a bias, capped", replace(PLAIN, pp=2, tp=2, microbatches=3, schedule="zb_h1")),
    ("tied, with a bias, capped", CASES[5]),
    ("a function of logits, capped", CASES[2]),
    ("a function of logits, capped", replace(PLAIN, microbatches=2, recompute="full")),
    ("two losses", CASES[3]),
    (
        "two losses",
        replace(PLAIN, dp=2, tp=2, sp=True, microbatches=2, state="zero 3 over dp", clip=0.05),
    ),
]
"""Each head with the whole vocabulary and with one that is shared out, each kind of mesh and of
training.
"""
EVERY = [
    pytest.param(*each, marks=pytest.mark.long) for each in product(HEADS, CASES) if each not in FEW
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "case"), [*FEW, *EVERY], ids=str)
def test_steps_equal_plain_torch(name: str, case: Case, tmp_path: Path) -> None:
    head = HEADS[name]
    text = plan_text(head, case)
    kinds = {
        op.kind for op in walk(compile_plan(Source("heads.scale", text), "fuse_ops").region.body)
    }
    assert (head.parts if case.vocab and case.tp > 1 else head.whole) in kinds
    module = load_program(text, tmp_path)
    start, batches = (
        random_parameters(harness.initial(case, module, seed=5), 1 / 2),
        [*harness.batches(case, STEPS)],
    )
    expected = train(partial(total, head, case.config.classes), case.training, start, batches, LR)
    for number, (got, want) in enumerate(
        zip(harness.run(case, module, start, batches, LR), expected, strict=True)
    ):
        assert_same(got, want, f"step {number}: ", tolerance=1e-10)
