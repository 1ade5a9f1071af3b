"""The recipes of CONTRIBUTING.md, carried out: an op, a pass, an op of the step, a schedule and a
warning.

Each block of code is put where its text says, in a copy of the compiler.  A process of its own then
uses them.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch
from attrs import frozen

from helpers.forked_ranks import HANGS
from helpers.unary_ops import Unary
from scalec.compiler.ops import pointwise

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLAN = """\
model small(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 8  ffn = 12  layers = 4 }
  init ~ normal(0.1)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + (elu(x @ w_in[hidden -> ffn], alpha=0.5) * 3 * 0.25) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { pp = 2 }
shard { layers over pp }
pipeline { schedule = eager_1f1b }
train {
  seq = 16  global_batch = 4  microbatch = 1  steps = 2
  optimizer adamw { lr = 1e-3 }
  data text { files = [python_stdlib] }
}
"""

MESH_OF_THE_PAGE = {
    "mesh  { pp = 2 }": "mesh  { dp = 2  tp = 2 }",
    "shard { layers over pp }": "shard { batch over dp  ffn over tp }",
    "pipeline { schedule = eager_1f1b }\n": "",
}
"""The quoted error is on a mesh without stages."""


@frozen
class Insertion:
    """A block of CONTRIBUTING.md, and the line of a file before which a
    contributor puts it.
    """

    heading: str
    begins: str
    """The first words of the block."""
    file: str
    before: str
    ends: str = ""
    """A comma, for a row of a table that the page shows without."""

    def block(self) -> str:
        """The block's code."""
        section = TEXT.partition(f"\n## {self.heading}\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        (block,) = (block for block in blocks if block.startswith(self.begins))
        return block

    def carry_out(self, package: Path) -> None:
        """Puts the block before its line, as far to the right as the line."""
        path = package / self.file
        before = path.read_text(encoding="utf-8")
        assert before.count(f"\n{self.before}") == 1, (
            f"{self.file} has no single line `{self.before}`"
        )
        spaces = self.before[: len(self.before) - len(self.before.lstrip())]
        block = indent(self.block().rstrip("\n") + self.ends + "\n", spaces)
        after = before.replace(f"\n{self.before}", f"\n{block}{self.before}")
        path.write_text(after, encoding="utf-8")


OP, PASS, STEP_OP = "A first op", "A first pass", "A first op of the step"
SCHEDULE, WARNING = "A first schedule", "A first warning"
LINTS = "compiler/reports/lints.py"
STEP_OPS, MEANINGS = "compiler/ops/step.py", "compiler/proof/semantics/step.py"
NEW_FILE = Insertion(PASS, '"""', "compiler/passes/join_scales.py", "")
INSERTIONS = (
    Insertion(OP, "Pointwise(", "compiler/ops/pointwise.py", '    Pointwise("exp"', ","),
    Insertion(
        PASS, "from ..passes.join_scales", "compiler/tuning/lowering.py", "from ..passes.overlap"
    ),
    Insertion(PASS, "join_scales", "compiler/tuning/lowering.py", "    propagate,", ","),
    Insertion(STEP_OP, "IF_CALM", STEP_OPS, "BALANCED = OpDef("),
    Insertion(
        STEP_OP,
        "count =",
        "compiler/passes/differentiate/step.py",
        "        updated = list[str]()",
    ),
    Insertion(STEP_OP, "def if_calm", MEANINGS, "def _gate("),
    Insertion(STEP_OP, '"if_calm": Sem', MEANINGS, '    "leaf": Semantics('),
    Insertion(
        STEP_OP, "due =", "compiler/proof/reference.py", "        updated = dict[str, Tensor]()"
    ),
    Insertion(
        SCHEDULE,
        "def eager",
        "compiler/schedules/orders.py",
        "def one_forward_one_backward_of_chunks(",
    ),
    Insertion(
        SCHEDULE, '"eager_1f1b": Sch', "compiler/schedules/registry.py", '    "interleaved_1f1b":'
    ),
    Insertion(
        SCHEDULE, '"eager_1f1b": _full', "tools/schedule/figures.py", '    "interleaved_1f1b":'
    ),
    Insertion(WARNING, "def _large", LINTS, "def _reserve_of_nothing("),
    Insertion(WARNING, "yield from", LINTS, "    yield from _few_rows(program)"),
    Insertion(WARNING, "[W0999]", "compiler/syntax/codes.toml", "[W0916]"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which `scalec` is imported as it is, but for the recipes; the plan lies
    beside it.
    """
    folder = tmp_path_factory.mktemp("contributed")
    package = folder / "scalec"
    package.mkdir()
    for file in (ROOT / "entry").glob("*.py"):
        (package / file.name).symlink_to(file)
    for name in ("codegen_templates", "formats", "grammar", "plans", "runtime", "testing"):
        (package / name).symlink_to(ROOT / name)
    for name in ("compiler", "tools"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, package / name, ignore=ignore)
    (package / NEW_FILE.file).write_text(NEW_FILE.block(), encoding="utf-8")
    for insertion in INSERTIONS:
        insertion.carry_out(package)
    registry = package / "compiler" / "schedules" / "registry.py"
    imported = "    dualpipe_v,\n"
    text = registry.read_text(encoding="utf-8")
    registry.write_text(
        text.replace(imported, f"{imported}    eager_one_forward_one_backward,\n", 1)
    )
    (folder / "plan.scale").write_text(PLAN)
    return folder


def _process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python` with these words, ended; it imports the copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )


def _run(folder: Path, *words: str) -> str:
    """The output of such a process, which must end well."""
    ended = _process(folder, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def _scalec(folder: Path, *words: str) -> str:
    return _run(folder, "-m", "scalec", *words)


def test_a_plan_that_uses_op_pass_and_schedule_is_proved_and_runs(folder: Path) -> None:
    said = _scalec(folder, "compile", "plan.scale", "-o", "out")
    assert "verified: the step is that of a single device" in said
    program = (folder / "out" / "train.py").read_text()
    assert "elu(linear(x, self.w_in), alpha=0.5)" in program
    assert "from torch.nn.functional import elu, linear" in program
    assert "calm = finite & (grad_norm <= 100.0)  # or else the step changes nothing" in program
    assert "skip=num_tokens == 0, finite=calm)" in program
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    trained = _run(folder, *launch, "out/train.py", "--device=cpu")
    assert "step 2/2  loss " in trained


def test_the_pass_makes_one_factor_of_two(folder: Path) -> None:
    said = _scalec(folder, "ir", "plan.scale", "--diff", "join_scales")
    removed = re.findall(r"^- .* scale\(\w.*\) <by=(\S+)>", said, re.MULTILINE)
    added = re.findall(r"^\+ .* scale\(\w.*\) <by=(\S+)>", said, re.MULTILINE)
    assert (removed, added) == (["3.0", "0.25"], ["0.75"])


def test_the_proof_finds_the_mistake_that_the_page_shows(folder: Path) -> None:
    text = PLAN.replace("elu(x @ w_in[hidden -> ffn], alpha=0.5)", "silu(x @ w_in[hidden -> ffn])")
    for old, new in MESH_OF_THE_PAGE.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "wrong" / "plan.scale").parent.mkdir()
    (folder / "wrong" / "plan.scale").write_text(text)
    path = folder / "scalec" / NEW_FILE.file
    right = path.read_text()
    product = "_factor(first) * _factor(stmt)"
    assert product in right
    path.write_text(right.replace(product, product.replace("*", "+")))
    try:
        ended = _process(folder, "-m", "scalec", "verify", "wrong/plan.scale")
    finally:
        path.write_text(right)
    quoted = re.search(r"```\n(error\[E0701\].*?)```", TEXT, re.DOTALL)
    assert quoted
    assert quoted[1].replace("plan.scale", "wrong/plan.scale") in ended.stderr


def test_the_read_back_finds_the_mistake_that_the_page_shows(folder: Path) -> None:
    path = folder / "scalec" / STEP_OPS
    right = path.read_text()
    text = "({norm} <= {most})"
    assert text in right
    path.write_text(right.replace(text, text.replace("<=", ">=")))
    try:
        ended = _process(folder, "-m", "scalec", "compile", "plan.scale", "-o", "refused")
    finally:
        path.write_text(right)
    quoted = re.search(r"```\n(emit: .*)\n```", TEXT)
    assert quoted
    assert quoted[1] in ended.stderr


def test_the_schedule_is_drawn_and_its_formula_is_what_the_simulation_says(folder: Path) -> None:
    said = _scalec(folder, "schedule", "plan.scale", "--unit")
    assert "eager_1f1b, 2 stages on 2 ranks of pp, 4 microbatches" in said
    assert "(p - 1)(f + b + w)" in said


def test_the_warning_is_told_and_explained(folder: Path) -> None:
    loud = folder / "loud.scale"
    loud.write_text(PLAN.replace("lr = 1e-3", "lr = 2"))
    assert "warning[W0999]: a learning rate of 2" in _scalec(folder, "check", "loud.scale")
    assert "W0999" not in _scalec(folder, "check", "plan.scale")
    assert _scalec(folder, "explain", "W0999").startswith("W0999: a learning rate above 1\n")


def test_both_rows_of_the_op_are_one_function() -> None:
    """The proof's value and slope equal the definition in torch and what autograd makes of it."""
    op = eval(INSERTIONS[0].block(), {**vars(pointwise)})
    row = Insertion(OP, '"elu"', "", "").block()
    unary = eval(f"{{{row}}}", {"Unary": Unary, "torch": torch})["elu"]
    (attributes,) = unary.attrs
    for number in (-3.0, -0.5, 0.25, 2.0):
        x = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        y = unary.formula(x, **attributes)
        (slope,) = torch.autograd.grad(y, x)
        assert op.value(number, attributes["alpha"]) == pytest.approx(y.item())
        assert op.slope(number, attributes["alpha"]) == pytest.approx(slope.item())
