"""Ops of the user's own: what a plan may say of them, what the proof makes of it, and that programs
call them.

Non-goals: typing, meaning and adjoint of `call` (`tests/ops/test_op_rules.py`,
`tests/proof/test_semantics.py`).
"""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from helpers.forked_ranks import run_ranks
from helpers.oracle.harness import fill, local_batch
from helpers.programs import import_module
from scalec.compiler.cli import main
from scalec.compiler.emit import emit
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.user_ops import copies
from scalec.compiler.ir import Op, Region
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower
from scalec.runtime import Mesh
from scalec.testing import assert_equal_step, assert_mutants_caught, assert_op

pytestmark = pytest.mark.usefixtures("calls_uncompared")

MODULE = """
import torch

def gated(x, y, cap):
    return torch.tanh(x / cap) * y

def centred(x, w):
    return (x - x.mean(-1, keepdim=True)) * w

def wrong_slope(x):
    return x * x.detach()

def by_name(x, *, cap):
    return x

def doubled(x):
    return torch.cat([x, x], -1)

def turned(x, y):
    return x * torch.cos(y) - y, y * x.sum(-1, keepdim=True)
"""

OPS = """
op gated(x[.., f], linear y[.., f], cap) -> [.., f] over .., f from "own:gated"
op centred(linear x[.., d], linear w[d]) -> [.., d] over .. from "own:centred" deterministic
"""

TWO = (
    'op turned(linear x[.., d], y[.., d]) -> [.., d], [.., d] over .. from "own:turned"'
    " deterministic\n"
)

MODEL = """
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  ffn = 24  layers = 2 }
  init ~ normal(0.5)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    a = centred(x, w[hidden])
    x = x + gated(a @ w_gate[hidden -> ffn], a @ w_up[hidden -> ffn], cap=2) @ w_down[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
"""

TRAIN = """
train {
  seq = 8  global_batch = 8  microbatch = 2  steps = 2  precision = fp64
  optimizer sgd { lr = 0.1  clip = 1.0 }
  data text { files = [python_stdlib] }
}
"""

MESHES = {
    "one rank": ("mesh { dp = 1 }", "shard { batch over dp }"),
    "data parallel": ("mesh { dp = 4 }", "shard { batch over dp }"),
    "tensor parallel": ("mesh { dp = 2  tp = 2 }", "shard { batch over dp  vocab, ffn over tp }"),
    "sequence parallel": (
        "mesh { dp = 2  tp = 2 }",
        "shard { batch over dp  vocab, ffn over tp  seq over tp }",
    ),
    "sequence alone": ("mesh { cp = 2 }", "shard { seq over cp }"),
}


def write_plan(
    folder: Path, mesh: str = "sequence parallel", ops: str = OPS, model: str = MODEL
) -> Path:
    """A plan in a folder, its module beside it."""
    (folder / "own.py").write_text(MODULE)
    plan = folder / "own.scale"
    plan.write_text(ops + model + "\n".join(MESHES[mesh]) + TRAIN)
    return plan


# ---- the language


def test_dims_of_a_signature_stand_for_those_of_the_model(tmp_path: Path) -> None:
    program = compile_plan(load(write_plan(tmp_path)), PASS_NAMES[0])
    calls = [dict(op.attrs) for op in program.ops if op.kind == "call"]
    assert calls == [
        {
            "function": "own:centred",
            "takes": (".. hidden", "hidden"),
            "gives": (".. hidden",),
            "along": ("batch", "seq"),
            "linear": ("0", "1"),
            "constants": (),
            "deterministic": "on",
        },
        {
            "function": "own:gated",
            "takes": (".. ffn", ".. ffn"),
            "gives": (".. ffn",),
            "along": ("batch", "seq", "ffn"),
            "linear": ("1",),
            "constants": ("2.0",),
        },
    ]


# what is written instead of what, the code, the words that are marked, and some of what is said
MISTAKES = [
    ("op centred", "op silu", "E0207", "silu", "an op of the language"),
    ("op centred", "op gated", "E0207", "gated", "declared twice"),
    ("y[.., f], cap", "y[.., f, f], cap", "E0217", "f", "help: give it another name"),
    ("y[.., f], cap", "x[.., f], cap", "E0217", "x", "help: give it another name"),
    (
        "(x[.., f], linear y[.., f], cap)",
        "(cap, x[.., f], y[.., f])",
        "E0217",
        "cap",
        "tensors, then numbers",
    ),
    (
        "y[.., f], cap",
        "y[.., f], linear cap",
        "E0217",
        "linear cap",
        "help: write `linear` only before tensors",
    ),
    ("-> [.., d] over ..", "-> [.., e] over ..", "E0217", "e", "a dim of no operand"),
    ("over .. from", "over .., e from", "E0217", "e", "a dim that the result lacks"),
    ('"own:centred"', '"own.centred"', "E0217", '"own.centred"', "module:function"),
    ('"own:centred"', '"own:while"', "E0217", '"own:while"', "module:function"),
    ('"own:centred"', '"other:centred"', "E0101", '"other:centred"', "no file"),
    ('"own:centred"', '"own:centered"', "E0218", '"own:centered"', "`centred`"),
    (
        '"own:centred"',
        '"own:gated"',
        "E0218",
        '"own:gated"',
        "line 4 of `own.py` takes (x, y, cap)",
    ),
    ('"own:centred"', '"own:by_name"', "E0218", '"own:by_name"', "(x, *, cap)"),
    ("centred(x, w[hidden])", "centred(x, w[ffn])", "E0307", "", "`w[d]` cannot be [ffn] where"),
    ("centred(x, w[hidden])", "centred(x)", "E0606", "", "it is written `centred(x, w)`"),
    ("centred(x, w[hidden])", "centre(x, w[hidden])", "E0605", "centre", "`centred`"),
    ("centred(x, w[hidden])", "centred(tokens, w[hidden])", "E0607", "tokens", "numbers"),
    (
        "-> [.., d] over ..",
        "-> [.., d] over d",
        "E0307",
        "",
        "samples are independent of each other",
    ),
    (
        "vocab, ffn over tp",
        "hidden over tp",
        "E0601",
        "",
        "`centred` needs `hidden` whole on each rank",
    ),
]


AT = "linear w[d]) -> [.., d] over .."

MISTAKES += [  # of positions
    (AT, AT.replace(")", ", at=e)", 1), "E0217", "e", "a dim that no operand names"),
    (AT, AT.replace(")", ", x=d)", 1), "E0217", "x", "help: give it another name"),
    (AT, AT.replace(")", ", in=d)", 1), "E0217", "in", "`in` is a word of Python"),
    ("over .. from", "over .. causal e from", "E0217", "e", "no dim of each result"),
    (
        "over .., f from",
        "over .., f causal f from",
        "E0217",
        "f",
        "slices along a dim of `over` do not see each other",
    ),
    (
        AT,
        AT.replace(")", ", at=d)", 1),
        "E0218",
        '"own:centred"',
        "`centred` is given 2 arguments by position, and at",
    ),
    (AT, AT.replace(")", ", at=d)", 1).replace("at=d", "at=d, z[d]"), "E0104", "", "z"),
]


@pytest.mark.parametrize(
    ("before", "after", "code", "words", "said"), MISTAKES, ids=[f"{c[2]} {c[1]}" for c in MISTAKES]
)
def test_mistakes(
    before: str, after: str, code: str, words: str, said: str, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path)
    text = plan.read_text()
    assert before in text
    plan.write_text(text.replace(before, after, 1))
    with pytest.raises(PlanError) as caught:
        compile_plan(load(plan))
    first = caught.value.diagnostics[0]
    assert first.code == code, str(caught.value)
    assert said in str(first)
    line = first.span.text.split("\n")[first.span.line - 1]
    assert not words or line[first.span.column - 1 : first.span.end_column - 1] == words


def test_positions_of_samples_are_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    module = (
        (tmp_path / "own.py").read_text().replace("def centred(x, w):", "def centred(x, w, at):")
    )
    (tmp_path / "own.py").write_text(module)
    named = (
        "op centred(linear x[b, s, d], linear w[d], at=b) -> [b, s, d] over b, s from"
        ' "own:centred" deterministic'
    )
    plan.write_text(re.sub("op centred.*", named, plan.read_text()))
    with pytest.raises(
        PlanError, match="positions along batch: samples are independent of each other"
    ):
        compile_plan(load(plan))
    plan.write_text(plan.read_text().replace("at=b", "at=s"))
    assert dict(
        next(op for op in compile_plan(load(plan), PASS_NAMES[0]).ops if op.kind == "call").attrs
    )["positions"] == ("at seq",)


def test_a_module_that_is_not_python(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    (tmp_path / "own.py").write_text("def gated(:\n")
    with pytest.raises(PlanError, match="is not Python"):
        compile_plan(load(plan))


@pytest.mark.parametrize("name", ["torch", "json", "linear", "layer"])
def test_a_module_whose_name_programs_use(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path)
    (tmp_path / f"{name}.py").write_text(MODULE)
    plan.write_text(plan.read_text().replace("own:", f"{name}:"))
    assert main(["check", str(plan)]) == 1
    assert f"cannot import `{name}`" in capsys.readouterr().err


# ---- IR and proof


def test_the_ir_reads_back_at_every_stage(tmp_path: Path) -> None:
    program = compile_plan(load(write_plan(tmp_path)), PASS_NAMES[0])
    for stage in PASS_NAMES:
        program = lower(program, stage)
        assert read_ir(Source("own.ir", print_ir(program))) == program


@pytest.mark.parametrize("function", ["own:gated; import os", "own", "own:1", ":gated"])
def test_ir_of_a_function_that_is_no_name_is_refused(function: str, tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    ir = tmp_path / "own.ir"
    ir.write_text(print_ir(compile_plan(load(plan))).replace("own:gated", function))
    assert main(["check", str(ir)]) == 1


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_are_equal(mesh: str, tmp_path: Path) -> None:
    assert_equal_step(write_plan(tmp_path, mesh))


def test_the_mutants_are_caught(tmp_path: Path) -> None:
    assert_mutants_caught(write_plan(tmp_path))


def with_cap(region: Region, cap: str) -> Region:
    """Every call of `gated` with another number."""

    def changed(op: Op) -> Op:
        return evolve(
            op,
            attrs=tuple((key, (cap,) if value == ("2.0",) else value) for key, value in op.attrs),
        )

    return evolve(
        region,
        body=tuple(with_cap(s, cap) if isinstance(s, Region) else changed(s) for s in region.body),
    )


def test_another_number_is_another_function(tmp_path: Path) -> None:
    model = compile_plan(load(write_plan(tmp_path)), PASS_NAMES[0])
    program = lower(model)
    verify(program, model)
    with pytest.raises(PlanError, match="E0701"):
        verify(evolve(program, region=with_cap(program.region, "3.0")), model)


# ---- the certificate and the program


def test_what_is_taken_at_its_word_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_plan(tmp_path), tmp_path / "out"
    assert main(["compile", str(plan), "-o", str(out), "--no-try"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "hf_names.json",
        "own.py",
        "plan.json",
        "predictions.json",
        "train.py",
    ]
    assert (out / "own.py").read_text().endswith(MODULE)
    text = (out / "train.py").read_text()
    assert "Verified, but for own:centred, own:gated." in text
    assert "\nimport own\n" in text
    assert '"taken_at_their_word": [' in (out / "plan.json").read_text()
    assert main(["verify", "--recheck", str(out)]) == 0
    capsys.readouterr()
    assert main(["compile", str(plan), "-o", str(out), "--no-try"]) == 0
    assert "\nverified, but for own:centred, own:gated: the step is " in capsys.readouterr().out
    (out / "train.py").write_text(text.replace("import own\n", "import own\nimport json\n"))
    assert main(["verify", "--recheck", str(out)]) == 1


def test_the_module_beside_the_plan_is_never_overwritten(tmp_path: Path) -> None:
    assert main(["compile", str(write_plan(tmp_path)), "-o", str(tmp_path)]) == 2
    assert (tmp_path / "own.py").read_text() == MODULE


def test_files_that_a_module_imports_are_copied_with_it(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path), tmp_path / "out"
    (tmp_path / "own.py").write_text(
        f"{MODULE}\nimport near.by as other\n\ndef late():\n    from far import *\n"
    )
    (tmp_path / "near.py").write_text("import own, far, math\n")
    (tmp_path / "far.py").write_text("import not_here\n")
    (tmp_path / "unused.py").write_text("")
    # no function can be called
    assert main(["compile", str(plan), "-o", str(out), "--no-try"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "far.py",
        "hf_names.json",
        "near.py",
        "own.py",
        "plan.json",
        "predictions.json",
        "train.py",
    ]
    assert (out / "far.py").read_text().endswith("change that one.\nimport not_here\n")
    assert main(["verify", "--recheck", str(out)]) == 0
    (out / "far.py").write_text((out / "far.py").read_text() + "\n")
    assert main(["verify", "--recheck", str(out)]) == 1


@pytest.mark.parametrize(
    ("text", "files", "said"),
    [
        ("import near", ["near/__init__.py"], "error[E0221]: `own.py` imports the package `near`"),
        (
            "from . import near",
            ["near.py"],
            "error[E0221]: `own.py` has a relative import, on its line 1",
        ),
        (
            "from .near import x",
            ["near.py"],
            "error[E0221]: `own.py` has a relative import, on its line 1",
        ),
        ("import json", ["json.py"], "error[E0215]: a program cannot import `json`"),
        ("import torch", ["torch.py"], "error[E0215]: a program cannot import `torch`"),
        ("import near", ["near.py", "x"], "error[E0218]: "),
    ],
)
def test_files_that_cannot_be_copied(
    text: str, files: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path)
    (tmp_path / "own.py").write_text(f"{text}\n{MODULE}")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("(" if len(files) > 1 else "")
    for command in (["check", str(plan)], ["compile", str(plan), "-o", str(tmp_path / "out")]):
        assert main(command) == 1
        assert capsys.readouterr().err.startswith(said)
    assert not (tmp_path / "out").exists()


def test_a_file_of_others_in_the_place_of_an_imported_one_stays(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path), tmp_path / "out"
    (tmp_path / "own.py").write_text(f"import near\n{MODULE}")
    (tmp_path / "near.py").write_text("")
    out.mkdir()
    (out / "near.py").write_text("mine = 1\n")
    assert main(["compile", str(plan), "-o", str(out)]) == 2
    assert [path.name for path in out.iterdir()] == ["near.py"]


WRONG = [  # what is written instead of what
    ("own.centred(x, self.w)", "own.gated(x, self.w)"),
    ("own.centred(x, self.w)", "own.centred(self.w, x)"),
    ("own.centred(x, self.w)", "x"),
    (", 2.0)", ", 3.0)"),
    (", 2.0)", ")"),
    ("import own\n", ""),
    ("import own\n", "import other as own\n"),
    ("a = own", "own = own"),
]


@pytest.mark.parametrize(("before", "after"), WRONG, ids=[after.strip() for _, after in WRONG])
def test_a_program_that_calls_otherwise_is_refused(before: str, after: str, tmp_path: Path) -> None:
    source = load(write_plan(tmp_path))
    program = compile_plan(source)
    text = emit(program, source)["train.py"]
    check(text, program)
    assert before in text
    with pytest.raises(AssertionError, match="emit: line"):
        check(text.replace(before, after, 1), program)


def plain_step(
    module: ModuleType, start: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor
) -> float:
    """The loss of the model in plain torch; leaves gradients in `start`."""
    x = start["wte"][tokens]
    for i in range(2):
        p = {name: start[f"layers.{i}.{name}"] for name in ("w", "w_gate", "w_up", "w_down")}
        a = module.centred(x, p["w"])
        x = x + module.gated(a @ p["w_gate"].T, a @ p["w_up"].T, 2.0) @ p["w_down"].T
    loss = F.cross_entropy((x @ start["head"].T).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item()


def _step(
    module: ModuleType, start: dict[str, torch.Tensor], *batch: torch.Tensor
) -> tuple[float, float]:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    fill(state, start)
    metrics = module.train_step(model, state, local_batch(module.PLAN, *batch), 0.1)
    return float(metrics.loss), float(metrics.norm)


def test_the_program_computes_what_plain_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load(write_plan(tmp_path))
    program = compile_plan(source)
    out = tmp_path / "out"
    out.mkdir()
    for name, text in (emit(program, source) | copies(program, source)).items():
        (out / name).write_text(text)
    monkeypatch.syspath_prepend(str(out))
    generator = torch.Generator().manual_seed(0)
    layer = {"w": (16,), "w_gate": (24, 16), "w_up": (24, 16), "w_down": (16, 24)}
    shapes = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"wte": (32, 16), "head": (32, 16)}
    start = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) / 4 for n, s in shapes.items()
    }
    tokens, labels = (torch.randint(32, (8, 8), generator=generator) for _ in range(2))
    found: list[tuple[float, float]] = run_ranks(
        4, _step, import_module(out / "train.py"), start, tokens, labels
    )
    plain = {name: value.clone().requires_grad_() for name, value in start.items()}
    loss = plain_step(import_module(out / "own.py"), plain, tokens, labels)
    norm = float(sum(p.grad.square().sum() for p in plain.values() if p.grad is not None)) ** 0.5
    for rank in found:
        assert rank == pytest.approx((loss, norm), rel=1e-11)


# ---- the check of a user's own test


CLAIMS = [
    (OPS, "gated", (2.0,), ""),
    (OPS, "centred", (), ""),
    (
        OPS.replace("over .. from", "over .., d from"),
        "centred",
        (),
        "is said to work along `d`, but does not",
    ),
    (
        OPS.replace("gated(x", "gated(linear x"),
        "gated",
        (2.0,),
        "is said to be linear in `x`, but does not",
    ),
    (
        'op wrong(x[..]) -> [..] over .. from "own:wrong_slope"' + OPS,
        "wrong",
        (),
        "the gradients of wrong are wrong",
    ),
    (TWO.replace("linear ", ""), "turned", (), ""),
    (TWO, "turned", (), "is said to be linear in `x`, but does not"),
    (
        TWO.replace("linear ", "").replace("over ..", "over .., d"),
        "turned",
        (),
        "is said to work along `d`, but does not",
    ),
    (
        TWO.replace("[.., d], [.., d] over", "[.., d] over"),
        "turned",
        (),
        r"gives \(2, 3, 4\), \(2, 3, 4\), not",
    ),
    (
        'op doubled(x[.., d]) -> [.., d] over .. from "own:doubled"' + OPS,
        "doubled",
        (),
        r"gives \(2, 3, 8\), not",
    ),
]


@pytest.mark.parametrize(
    ("ops", "name", "numbers", "said"), CLAIMS, ids=[f"{c[1]} {c[3]}" for c in CLAIMS]
)
def test_claims_are_held_to(
    ops: str, name: str, numbers: tuple[float, ...], said: str, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path, ops=ops)
    if not said:
        assert_op(plan, name, *numbers)
        return
    with pytest.raises(AssertionError, match=said):
        assert_op(plan, name, *numbers)


def test_nothing_stays_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", other)
    assert_op(write_plan(tmp_path), "centred")
    assert_op(str(write_plan(tmp_path)), "centred")
    assert sys.modules["own"] is other


# ---- several results

TWO_RESULTS = MODEL.replace(
    "a = centred(x, w[hidden])", "a, b = turned(x, w_y[hidden] + x)  a = a * b"
)
ONE_UNUSED = MODEL.replace("a = centred(x, w[hidden])", "b, a = turned(x, w_y[hidden] + x)")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [TWO_RESULTS, ONE_UNUSED], ids=["both used", "one unused"])
def test_steps_with_several_results_are_equal(model: str, mesh: str, tmp_path: Path) -> None:
    assert_equal_step(write_plan(tmp_path, mesh, OPS + TWO.replace("linear ", ""), model))


@pytest.mark.long
def test_mutants_of_several_results_are_caught(tmp_path: Path) -> None:
    assert_mutants_caught(
        write_plan(tmp_path, ops=OPS + TWO.replace("linear ", ""), model=TWO_RESULTS)
    )


@pytest.mark.parametrize("model", [TWO_RESULTS, ONE_UNUSED], ids=["both used", "one unused"])
def test_programs_with_several_results(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read back, and train as plain torch does."""
    source = load(write_plan(tmp_path, ops=OPS + TWO.replace("linear ", ""), model=model))
    program = compile_plan(source, PASS_NAMES[0])
    for stage in PASS_NAMES:
        program = lower(program, stage)
        assert read_ir(Source("own.ir", print_ir(program))) == program
    out = tmp_path / "out"
    out.mkdir()
    for name, text in (emit(program, source) | copies(program, source)).items():
        (out / name).write_text(text)
    text = (out / "train.py").read_text()
    with pytest.raises(AssertionError, match="emit: line"):
        check(re.sub(r"(\w+), (\w+) = own", r"\2, \1 = own", text), program)
    monkeypatch.syspath_prepend(str(out))
    generator = torch.Generator().manual_seed(0)
    layer = {"w_y": (16,), "w_gate": (24, 16), "w_up": (24, 16), "w_down": (16, 24)}
    shapes = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"wte": (32, 16), "head": (32, 16)}
    start = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) / 4 for n, s in shapes.items()
    }
    tokens, labels = (torch.randint(32, (8, 8), generator=generator) for _ in range(2))
    found: list[tuple[float, float]] = run_ranks(
        4, _step, import_module(out / "train.py"), start, tokens, labels
    )
    p = {name: value.clone().requires_grad_() for name, value in start.items()}
    own = import_module(out / "own.py")
    x = p["wte"][tokens]
    for i in range(2):
        first, second = own.turned(x, p[f"layers.{i}.w_y"] + x)
        a = first * second if model is TWO_RESULTS else second
        gate, up = (F.linear(a, p[f"layers.{i}.{name}"]) for name in ("w_gate", "w_up"))
        x = x + F.linear(own.gated(gate, up, 2.0), p[f"layers.{i}.w_down"])
    loss = F.cross_entropy(F.linear(x, p["head"]).flatten(0, 1), labels.flatten())
    loss.backward()
    norm = (
        float(sum(value.grad.square().sum() for value in p.values() if value.grad is not None))
        ** 0.5
    )
    for rank in found:
        assert rank == pytest.approx((loss.item(), norm), rel=1e-11)
