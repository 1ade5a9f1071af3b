"""The trial of functions: what is wrong is refused with what was seen, and right functions pass.

Non-goals: what commands make of it (`tests/cli/test_op_trials.py`).
"""

from pathlib import Path

import pytest

from helpers.random_models import own_ops
from helpers.random_models.draws import USER_OPS
from scalec.compiler.cli.compile import compile_source
from scalec.compiler.cli.op_trials import Trials
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.limits import load

WRONG_MODULE = """
import os
import sys
import time

import torch
from torch.autograd import Function

CALLS = []
BUFFERS = {}
TABLE = torch.linspace(1.0, 2.0, 64, dtype=torch.float64)


def mean_of_all(x):
    return x - x.mean(-1, keepdim=True)


def local_index(x):
    return x * torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)


def local_count(x):
    return x / x.shape[-1]


def looks_ahead(x):
    return x + x.roll(-1, -2)


def sees_the_last(x):
    return x + 1e-3 * x[..., -1:, :]


def neighbours(x):
    return x + x.roll(1, -1)


def clipped_together(x):
    return x * (20 / x.norm()).clamp(max=1)


def affine(x):
    return 2 * x + 1


def half_gradient(x):
    return x * x.detach()


class _Forgets(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, dz):
        x, y = ctx.saved_tensors
        return dz * y, None


class _HalfInFloat32(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.float() ** 2).to(x.dtype)

    @staticmethod
    def backward(ctx, dz):
        return dz * ctx.saved_tensors[0]


def half_in_float32(x):
    return _HalfInFloat32.apply(x)


def forgets(x, y):
    return _Forgets.apply(x, y)


def draws(x):
    return x * (torch.rand_like(x) > 0.5)


def counts_calls(x):
    CALLS.append(1)
    return x * len(CALLS)


def writes(x):
    x.data.mul_(1.5)
    return x * x


class _Reused(Function):
    @staticmethod
    def forward(ctx, x):
        buffer = BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return buffer.copy_(2 * x).detach()

    @staticmethod
    def backward(ctx, dz):
        return 2 * dz


def reuses(x):
    return _Reused.apply(x)


def doubled(x):
    return torch.cat([x, x], -1)


def two_results(x):
    return x, x + 1


def a_number(x):
    return float(x.sum())


def narrows(x):
    return x.float()


def widens(x):
    return x * torch.ones(x.shape[-1], device=x.device)


def on_the_cpu(x):
    return x * torch.ones(x.shape[-1]).to(x.dtype)


def own_table(x):
    return x * TABLE[: x.shape[-1]].to(x.dtype).sum(0, keepdim=True)


def raises(x):
    raise ValueError("no such thing")


def raises_in_slices(x):
    return x.unflatten(-1, (-1, 2)).flatten(-2)


def prints(x):
    print("hello")
    return 2 * x


def leaves(x):
    sys.exit(3)


def kills(x):
    os._exit(0)


def hangs(x):
    while True:
        time.sleep(1)


def gone(x):
    return x


del gone
"""

WRONG = [  # the signature, the words that are marked, and what was seen
    ("mean_of_all(x[.., f]) -> [.., f] over .., f", "f", "is not slice by slice along `ffn`: "),
    ("local_index(x[.., f]) -> [.., f] over .., f", "f", "when the function gets half of `ffn`"),
    (
        "local_count(x[.., f]) -> [.., f] over .., f",
        "f",
        "is not slice by slice along `ffn`: 24 of 24 results differ",
    ),
    (
        "neighbours(x[.., f]) -> [.., f] over .., f",
        "f",
        "12 of 24 results differ when the function gets half of `ffn`",
    ),
    (
        "clipped_together(x[.., f]) -> [.., f] over .., f",
        "..",
        "of one slice when the other slices of `batch` change",
    ),
    (
        "affine(linear x[.., f]) -> [.., f] over .., f",
        "linear x[.., f]",
        "is not linear in `x`: 24 of 24 results",
    ),
    ("half_gradient(x[.., f]) -> [.., f] over .., f", "x[.., f]", "has a wrong gradient by `x`: "),
    (
        "half_in_float32(x[.., f]) -> [.., f] over .., f",
        "x[.., f]",
        "has a wrong gradient by `x`: ",
    ),
    (
        "forgets(x[.., f], y[.., f]) -> [.., f] over .., f",
        "y[.., f]",
        "has a wrong gradient by `y`: ",
    ),
    ("draws(x[.., f]) -> [.., f] over .., f", "", "draws random numbers: "),
    ("counts_calls(x[.., f]) -> [.., f] over .., f", "", "is not the same function in each call: "),
    ("writes(x[.., f]) -> [.., f] over .., f", "", "writes to its operand `x`"),
    ("reuses(x[.., f]) -> [.., f] over .., f", "", "gives results that its next call overwrites"),
    ("doubled(x[.., f]) -> [.., f] over ..", "", "gives (2, 3, 8), not (2, 3, 4)"),
    (
        "two_results(x[.., f]) -> [.., f] over .., f",
        "",
        "gives (2, 3, 4), (2, 3, 4), not (2, 3, 4)",
    ),
    ("a_number(x[.., f]) -> [.., f] over .., f", "", "gives a result of type float, not a tensor"),
    ("narrows(x[.., f]) -> [.., f] over .., f", "", "gives float32 where its operands are float64"),
    ("widens(x[.., f]) -> [.., f] over ..", "", "gives float32 where its operands are bfloat16"),
    (
        "on_the_cpu(x[.., f]) -> [.., f] over .., f",
        "",
        "gives `mul` a tensor on the CPU, wherever its operands are",
    ),
    (
        "own_table(x[.., f]) -> [.., f] over ..",
        "",
        "gives `mul` a tensor on the CPU, wherever its operands are",
    ),
    ("raises(x[.., f]) -> [.., f] over .., f", "", "raises ValueError: no such thing (line "),
    ("raises_in_slices(x[.., f]) -> [.., f] over .., f", "", "when it gets one slice of `ffn`"),
    ("prints(x[.., f]) -> [.., f] over .., f", "", "prints"),
    ("leaves(x[.., f]) -> [.., f] over .., f", "", "calls sys.exit"),
    ("kills(x[.., f]) -> [.., f] over .., f", "", "ends its process"),
    ("hangs(x[.., f]) -> [.., f] over .., f", "", "has not ended after 2 s"),
    (
        "looks_ahead(x[.., s, f]) -> [.., s, f] over .., f causal s",
        "s",
        "is not causal along `seq`",
    ),
    (
        "sees_the_last(x[.., s, f]) -> [.., s, f] over .., f causal s",
        "s",
        "is not causal along `seq`",
    ),
    ("gone(x[.., f]) -> [.., f] over .., f", "", "is not there once `own.py` has been imported"),
]

RIGHT_MODULE = """
import torch
from torch.autograd import Function
from torch.nn.functional import silu

TABLE = torch.linspace(1.0, 2.0, 24, dtype=torch.float64)
LIBRARY = torch.library.Library("own_trial", "DEF")
LIBRARY.define("once(Tensor x) -> Tensor")  # a module that is loaded twice cannot do this


def same(x):
    return x


def normal(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def in_float32(x, g):
    y = x.float()
    return (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * g


def mean_in_float32(x):
    return x * x.float().square().mean(-1, keepdim=True).rsqrt().to(x.dtype)


def steep(x):
    return torch.sin(100 * x)


def running(x):
    return x.cumsum(-1)


def scanned(x):
    return x.cumsum(-2)


def logarithm(x):
    return torch.log(x)


def turned(x, y):
    return x * torch.cos(y) - y, y * x


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return silu(x) * y

    @staticmethod
    def backward(ctx, dz):
        x, y = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return dz * y * gate * (1 + x * (1 - gate)), dz * x * gate


def swiglu(x, y):
    return _SwiGLU.apply(x, y)


def of_24(x):
    return x * TABLE.to(device=x.device, dtype=x.dtype)


def in_pairs(x):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-second, first], -1).flatten(-2)


def by_position(x, scale, *, at):
    return x * (scale * at.to(x.dtype)).cos()


def by_table(x, at):
    return x * TABLE.to(device=x.device, dtype=x.dtype)[at]


def never_finite(x):
    return x / 0


def clamped(x, limit):
    return x.clamp(max=limit)
"""

RIGHT = [  # the signature, and further arguments of its call
    ("same(linear x[.., f]) -> [.., f] over .., f", ""),
    ("normal(x[.., f]) -> [.., f] over ..", ""),
    ("in_float32(x[.., f], linear g[.., f]) -> [.., f] over ..", ", x"),
    ("mean_in_float32(x[.., f]) -> [.., f] over ..", ""),
    ("steep(x[.., f]) -> [.., f] over .., f", ""),
    ("running(linear x[.., f]) -> [.., f] over ..", ""),
    ("scanned(linear x[.., s, f]) -> [.., s, f] over .., f causal s", ""),
    ("logarithm(x[.., f]) -> [.., f] over .., f", ""),
    ("turned(x[.., f], y[.., f]) -> [.., f], [.., f] over .., f", ", x"),
    ("swiglu(x[.., f], linear y[.., f]) -> [.., f] over .., f", ", x"),
    ("of_24(linear x[.., f]) -> [.., f] over ..", ""),
    ("in_pairs(linear x[.., f]) -> [.., f] over ..", ""),
    ("by_position(linear x[.., f], scale, at=f) -> [.., f] over .., f", ", 0.5"),
    ("by_table(linear x[.., f], at=f) -> [.., f] over .., f", ""),
    ("clamped(x[.., f], limit) -> [.., f] over .., f", ", 0.25"),
]

MODEL = """
model tiny(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 32  ffn = 24 }}
  init ~ normal(0.5)
  x = embedding(tokens, wte[vocab, ffn])
{calls}
  loss = cross_entropy(x @ head[ffn -> vocab], labels)
}}
mesh  {{ dp = 2 }}
shard {{ batch over dp }}
train {{
  seq = 8  global_batch = 8  microbatch = 2  steps = 2  precision = bf16
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = [python_stdlib] }}
}}
"""


def write_plan(folder: Path, module: str, signatures: list[str], calls: list[str]) -> Path:
    """A plan that calls functions of a module, both in files of a folder."""
    (folder / "own.py").write_text(module)
    declared = [f'op {each} from "own:{each.partition("(")[0]}"' for each in signatures]
    plan = folder / "own.scale"
    plan.write_text("\n".join(declared) + MODEL.format(calls="\n".join(calls)))
    return plan


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[Diagnostic]:
    """What is said of a plan that calls every wrong function."""
    folder = tmp_path_factory.mktemp("wrong")
    signatures = [signature for signature, _, _ in WRONG]
    names = [signature.partition("(")[0] for signature in signatures]
    calls = [f"  x = x + {name}({'x, x' if name == 'forgets' else 'x'})" for name in names]
    trials = Trials("", None, seconds=2)
    plan = compile_source(load(write_plan(folder, WRONG_MODULE, signatures, calls)))
    with pytest.raises(PlanError) as caught:
        trials.try_functions(plan.model, plan.source)
    trials.end()
    return list(caught.value.diagnostics)


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("signature", "words", "seen"), WRONG, ids=[each[0].partition("(")[0] for each in WRONG]
)
def test_wrong_functions_are_refused(
    signature: str, words: str, seen: str, refused: list[Diagnostic]
) -> None:
    name = signature.partition("(")[0]
    (mistake,) = [each for each in refused if each.message.startswith(f"`{name}` of `own.py` ")]
    assert mistake.code == "E0222"
    assert seen in mistake.message
    assert mistake.help
    assert mistake.span.words == (words or f'"own:{name}"')
    assert mistake.span.line == [each[0] for each in WRONG].index(signature) + 1


def test_the_functions_of_random_plans_pass(tmp_path: Path) -> None:
    calls = ["  a = gated(x, x, 2)", "  b, c = parted(x, x)", "  x = unit(a * b, g[ffn])"]
    plan = write_plan(tmp_path, Path(own_ops.__file__).read_text(), [], calls)
    (tmp_path / "own_ops.py").write_text(Path(own_ops.__file__).read_text())
    plan.write_text(USER_OPS + plan.read_text())
    trials, model = Trials("", None), compile_source(load(plan))
    functions = trials.try_functions(model.model, model.source)
    trials.end()
    assert [each.function for each in functions.tried] == [
        "own_ops:gated",
        "own_ops:parted",
        "own_ops:unit",
    ]


def test_a_function_without_finite_results_is_not_tried(tmp_path: Path) -> None:
    signatures = ["never_finite(x[.., f]) -> [.., f] over .., f"]
    trials, plan = (
        Trials("", None),
        compile_source(
            load(write_plan(tmp_path, RIGHT_MODULE, signatures, ["  x = never_finite(x)"]))
        ),
    )
    functions = trials.try_functions(plan.model, plan.source)
    trials.end()
    assert functions.untried == {
        "own:never_finite": "its results are not finite for any random operands"
    }


def test_right_functions_pass(tmp_path: Path) -> None:
    signatures, calls = [], []
    for signature, further in RIGHT:
        name = signature.partition("(")[0]
        signatures.append(signature)
        results = "a, b" if name == "turned" else "a"
        calls.append(
            f"  {results} = {name}(x{further})\n  x = x + a{' * b' if name == 'turned' else ''}"
        )
    trials = Trials("", None)
    plan = compile_source(load(write_plan(tmp_path, RIGHT_MODULE, signatures, calls)))
    functions = trials.try_functions(plan.model, plan.source)
    trials.end()
    assert functions.untried == {}
    assert len(functions.tried) == len(RIGHT)
    by_position = next(each for each in functions.tried if each.function == "own:by_position")
    assert by_position.checks[:2] == ("slice by slice along batch, seq, ffn", "linear in operand 1")
