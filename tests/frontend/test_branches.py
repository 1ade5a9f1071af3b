"""`if i < k` in `repeat … as i`, and statements of several results: what they mean, look like, and
refuse.

Each is held to what it stands for: repeats in a row, plain torch in one process, files of weights
bit for bit.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.compare import assert_same
from helpers.oracle.plans import Case
from helpers.oracle.reference import Tensors, Training, train
from helpers.programs import import_module, load_program, make_program, write_program
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, lower
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import export, saver
from scalec.runtime.checkpoint.hf_weights import Reader
from scalec.testing import assert_equal_step, assert_mutants_caught

pytestmark = pytest.mark.usefixtures("calls_uncompared")

DIMS = "vocab = 32  hidden = 8  ffn = 12  wide = 16  layers = 5  dense = 2"
HEAD = "model m(tokens[batch, seq], labels[batch, seq]) {\n"
BRANCHES = f"""{HEAD}
  dims {{ {DIMS} }}
  init ~ normal(0.5)
  init w, norm ~ normal(0.25)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers as i {{
    m = rmsnorm(x, norm[hidden], 1e-5)
    if i < dense {{
      y = silu(m @ w[hidden -> ffn]) @ w_back[ffn -> hidden]
    }} else {{
      y = tanh(m @ w[hidden -> wide]) @ w_back[wide -> hidden]
      if i < layers - 1 {{ y = y * scale[hidden] }}
    }}
    x = x + y
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
"""
NAMES = """names hf {
  wte = "wte"  head = "head"  norm = "layers.{i}.norm"  scale = "scale.{2*i+1}"
  w = "layers.{i}.in"  w_back = transposed("layers.{i}.out")
}
"""


def part(number: int, size: str, function: str, more: str = "") -> str:
    return f"""
  repeat layers_{number} {{
    m = rmsnorm(x, norm_{number}[hidden], 1e-5)
    y = {function}(m @ w_{number}[hidden -> {size}]) @ w_back_{number}[{size} -> hidden]
    {more}
    x = x + y
  }}
"""


REPEATS = f"""{HEAD}
  dims {{ {DIMS}  layers_0 = dense  layers_1 = 2  layers_2 = 1 }}
  init ~ normal(0.5)
  init w_0, w_1, w_2, norm_0, norm_1, norm_2 ~ normal(0.25)
  x = embedding(tokens, wte[vocab, hidden])
  {part(0, "ffn", "silu")} {part(1, "wide", "tanh", "y = y * scale[hidden]")} {part(2, "wide", "tanh")}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
"""

MESHES = {
    "one rank": ("mesh { dp = 1 }  shard { batch over dp }", Case()),
    "tensor": (
        "mesh { dp = 2  tp = 2 }  shard { batch over dp  vocab, ffn, wide over tp }",
        Case(dp=2, tp=2),
    ),
    "sequence": ("mesh { tp = 4 }  shard { vocab, ffn, wide over tp  seq over tp }", Case(tp=4)),
}
GROUPS = 'group a { params = ["w", "norm"]  weight_decay = 0.3  lr_scale = 0.5 }'


def trained(mesh: str, groups: str = "") -> str:
    """The sections beside a model."""
    sections, case = MESHES[mesh]
    return f"""{sections}
train {{
  seq = 8  global_batch = {case.rows}  microbatch = 2  steps = 2  precision = fp64
  optimizer sgd {{ lr = 0.1  {groups} }}
  data text {{ files = [python_stdlib] }}
}}
"""


def ir(text: str) -> str:
    """The program as text, without the places in the plan and the sizes of dims."""
    lines = re.sub(r" !\S+:\d+", "", print_ir(make_program(text))).split("\n")
    return "\n".join(line for line in lines if not line.startswith("dim "))


# ---- what a branch stands for


@pytest.mark.parametrize("mesh", MESHES)
def test_a_divided_repeat_is_repeats_in_a_row(mesh: str) -> None:
    written = trained(
        mesh,
        GROUPS.replace(
            '"w", "norm"', ", ".join(f'"{n}_{k}"' for n in ("w", "norm") for k in range(3))
        ),
    )
    assert ir(BRANCHES + trained(mesh, GROUPS)) == ir(REPEATS + written)


def test_the_parts_have_the_lengths_that_the_branches_give_them() -> None:
    program = make_program(BRANCHES + trained("one rank"))
    assert {name: program.size(f"layers_{k}") for k, name in enumerate("abc")} == {
        "a": 2,
        "b": 2,
        "c": 1,
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_are_equal(mesh: str) -> None:
    assert_equal_step(BRANCHES + trained(mesh))


@pytest.mark.long
def test_the_mutants_are_caught() -> None:
    assert_mutants_caught(BRANCHES + trained("tensor"))


def test_programs_read_back_at_every_stage() -> None:
    program = make_program(BRANCHES + NAMES + trained("tensor", GROUPS), PASS_NAMES[0])
    for stage in PASS_NAMES:
        program = lower(program, stage)
        assert read_ir(Source("m.ir", print_ir(program))) == program
    text = train_py(program, Source("m.scale", BRANCHES))
    check(text, program)
    assert "for layer_1 in self.layers_1:\n            x = layer_1(x)" in text
    assert '"""A layer, of 2.  x: [b, s, h]"""' in text


def plain(p: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum of token losses, layer by layer as the plan says it."""
    x = p["wte"][tokens]
    for i in range(5):
        k, j = (0, i) if i < 2 else (1, i - 2) if i < 4 else (2, 0)
        own = {name: p.get(f"layers_{k}.{j}.{name}_{k}") for name in ("norm", "w", "w_back")}
        m = F.rms_norm(x, (8,), own["norm"], 1e-5)
        y = F.linear(
            (F.silu if i < 2 else torch.tanh)(F.linear(m, _there(own["w"]))), _there(own["w_back"])
        )
        x = x + (y * p[f"layers_1.{j}.scale"] if k == 1 else y)
    logits = F.linear(x, p["head"])
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def _there(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_equal_plain_torch(mesh: str, tmp_path: Path) -> None:
    case = MESHES[mesh][1]
    folder = write_program(BRANCHES + trained(mesh, GROUPS), tmp_path)
    module = import_module(folder / "train.py")
    start = harness.initial(case, module, seed=5)
    batches = list(harness.batches(case, 2))
    meant = sorted({name.rpartition(".")[2] for name in start if re.search(r"(w|norm)_\d$", name)})
    training = Training(decay=tuple((n, 0.3) for n in meant), scale=tuple((n, 0.5) for n in meant))
    expected = train(plain, training, start, batches, 0.1)
    for number, (got, want) in enumerate(
        zip(harness.run(case, module, start, batches, 0.1), expected, strict=True)
    ):
        assert_same(got, want, f"step {number}: ")


# ---- names


def test_weights_go_out_as_they_came_in(tmp_path: Path) -> None:
    shapes = {"wte": (32, 8), "head": (32, 8)}
    for i in range(5):
        inner = 12 if i < 2 else 16
        shapes |= {
            f"layers.{i}.norm": (8,),
            f"layers.{i}.in": (inner, 8),
            f"layers.{i}.out": (inner, 8),
        }
    shapes |= {"scale.5": (8,), "scale.7": (8,)}  # 2·i + 1 of the layers 2 and 3
    generator = torch.Generator().manual_seed(0)
    before = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    (tmp_path / "in").mkdir()
    save_file(before, tmp_path / "in" / "model.safetensors")
    module = load_program(BRANCHES + NAMES + trained("tensor"), tmp_path / "p")
    run_ranks(4, _saved, module, tmp_path / "in", tmp_path / "checkpoints")
    export.export(tmp_path / "checkpoints" / "step-000000", tmp_path / "out", module.PLAN.names)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def _saved(module: harness.ModuleType, weights: Path, checkpoints: Path) -> None:
    _, state = module.build(Mesh(module.PLAN.mesh))
    Reader(weights, module.PLAN.names).fill(state)
    third = harness.kept(state)["layers_1.0.norm_1"]
    assert torch.equal(third, load_file(weights / "model.safetensors")["layers.2.norm"])
    saver.save(checkpoints, 0, state)


def test_names_that_the_plan_has_already_are_not_given_to_parts() -> None:
    text = BRANCHES.replace("dense = 2", "dense = 2  layers_0 = 8").replace(
        "x = emb", "w_1 = tokens  x = emb", 0
    )
    program = make_program(
        text.replace("    x = x + y", "    w_0 = y  x = x + w_0") + trained("one rank")
    )
    assert {"w_0_", "w_1", "w_2"} <= {param.name for param in program.params}
    assert {"layers_0", "layers_0_", "layers_1", "layers_2"} <= {dim.name for dim in program.dims}


# ---- other shapes of branches

FORMS = {  # the body of a repeat of five layers → the sizes of its parts
    "x = x + w[hidden]": [5],
    "if i < 1 { x = x + w[hidden] }": [1],
    "if i < 1 { } else { x = x + w[hidden] }": [4],
    "if i < 2 { if i < 1 { x = x + w[hidden] } else { x = x * w[hidden] } } else { x = x +"
    " v[hidden] }": [
        1,
        1,
        3,
    ],
    "if i < 2 { x = x + v[hidden] }  if i < 3 { x = x * w[hidden] }  x = x + u[hidden]": [2, 1, 2],
    "if i < sqrt(dense * 2) { x = x + v[hidden] }  x = x + u[hidden]": [2, 3],
}


@pytest.mark.parametrize("body", FORMS)
def test_forms_of_branches(body: str) -> None:
    start = BRANCHES[: BRANCHES.index("  init w")] + "  x = embedding(tokens, wte[vocab, hidden])\n"
    loss = "  loss = cross_entropy(x @ head[hidden -> vocab], labels)\n}\n"
    text = f"{start}  repeat layers as i {{ {body} }}\n{loss}" + trained("one rank")
    regions = [
        stmt for stmt in make_program(text, PASS_NAMES[0]).region.body if hasattr(stmt, "dim")
    ]
    program = make_program(text)
    assert [program.size(region.dim) for region in regions] == FORMS[body]  # type: ignore[union-attr]
    assert_equal_step(text)


def test_repeats_in_repeats() -> None:
    text = f"""{HEAD}
  dims {{ {DIMS}  blocks = 3 }}
  init ~ normal(0.5)
  x = embedding(tokens, wte[vocab, hidden])
  repeat blocks as b {{
    repeat layers as i {{
      if i < 2 {{ x = x + w[hidden] }} else {{ if b < 1 {{ x = x * w[hidden] }} else {{ x = tanh(x) + w[hidden] }} }}
    }}
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
names hf {{ wte = "wte"  head = "head"  w = "{{i}}.{{j}}" }}
"""
    program = make_program(text + trained("one rank"))
    assert {each.param: each.tensor for each in program.names if each.param.startswith("w_")} == {
        "w_0_0": "{i}.{j}",
        "w_0_1": "{i}.{j+2}",
        "w_1_0": "{i+1}.{j}",
        "w_1_1": "{i+1}.{j+2}",
    }
    assert_equal_step(text[: text.index("names")] + trained("one rank"))


# ---- several results

SPLIT = f"""{HEAD}
  dims {{ {DIMS}  three = 3 * ffn }}
  init ~ normal(0.5)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    gate, up, rest = split(x @ w[hidden -> three], [ffn, ffn, ffn])
    x = x + (silu(gate) * up) @ w_back[ffn -> hidden]
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
"""


@pytest.mark.parametrize("mesh", ["one rank", "tensor", "sequence"])
def test_split_is_a_slice_for_each_name(mesh: str, tmp_path: Path) -> None:
    text = SPLIT + trained(mesh).replace("ffn, wide over", "wide over").replace(
        "vocab, wide", "vocab"
    )
    assert_equal_step(text)
    case = MESHES[mesh][1]
    module = load_program(text, tmp_path)
    assert (
        "gate, up, rest = split(linear(x, self.w), FFN, FFN, FFN)"
        in (tmp_path / "train.py").read_text()
    )
    start = harness.initial(case, module, seed=5)
    batches = list(harness.batches(case, 1))
    for got, want in zip(
        harness.run(case, module, start, batches, 0.1),
        train(_gated, Training(), start, batches, 0.1),
        strict=True,
    ):
        assert_same(got, want, "")


def _gated(p: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    x = p["wte"][tokens]
    for i in range(5):
        gate, up, _ = F.linear(x, p[f"layers.{i}.w"]).chunk(3, -1)
        x = x + F.linear(F.silu(gate) * up, p[f"layers.{i}.w_back"])
    logits = F.linear(x, p["head"])
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def test_the_read_back_refuses_another_split() -> None:
    program = make_program(SPLIT + trained("one rank"))
    text = train_py(program, Source("m.scale", SPLIT))
    check(text, program)
    for wrong in ("gate, rest, up = split", "up, gate, rest = split"):
        with pytest.raises(AssertionError, match="emit: line"):
            check(text.replace("gate, up, rest = split", wrong), program)
    with pytest.raises(AssertionError, match="emit: line"):
        check(text.replace(", FFN, FFN, FFN)", ", FFN, 2 * FFN)"), program)


# ---- what is refused

# what is written instead of what, the code, the words that are marked, and some of what is said
WRONG = [
    ("repeat layers as i", "repeat layers", "E0219", "i", "a repeat whose index has a name"),
    ("if i < dense", "if j < dense", "E0219", "j", "the index of no repeat"),
    ("i < dense", "i < layers", "E0315", "layers", "always holds"),
    ("i < dense", "i < 0", "E0315", "0", "never holds"),
    ("i < dense", "i < dense / 4", "E0315", "dense / 4", "is a whole number"),
    ("layers - 1", "dense", "E0315", "dense", "here `i` goes from 2 to 4"),
    ("layers - 1", "lay - 1", "E0201", "lay", "neither a dim nor a constant"),
    ("x = x + y", "x = x + y * i", "E0219", "i", "is an index"),
    ("x = x + y", "i = x + y", "E0219", "i", "is an index"),
    ("as i", "as x", "E0219", "x", "has a meaning already"),
    ("y = tanh", "z = tanh", "E0201", "y", "only one side of a branch binds `y`"),
    ("repeat layers as", "repeat seq as", "E0216", "seq", "cannot go over"),
    ("repeat layers as", "repeat layer as", "E0201", "layer", "did you mean `layers`"),
    ("x = x + y\n", "x = x + y @ w_back\n", "E0306", "", ""),
    (
        "    x = x + y\n",
        "    if i < 2 { x = x + q[hidden] } else { x = x * q }\n",
        "E0209",
        "q",
        "used outside",
    ),
    (
        "    x = x + y\n",
        "    x = x + y\n  }\n  if i < 2 {\n",
        "E0219",
        "i",
        "a repeat whose index has a name",
    ),
    (
        "    x = x + y\n",
        "    x = x + y  a, b = split(x, [ffn])\n",
        "E0307",
        "[ffn]",
        "several dims",
    ),
    (
        "    x = x + y\n",
        "    x = x + y  a, b = split(x, [ffn, wide])\n",
        "E0307",
        "",
        "ffn 12 + wide 16",
    ),
    (
        "    x = x + y\n",
        "    x = x + split(x, [half, half])\n",
        "E0602",
        "split(x, [half, half])",
        "one tensor",
    ),
    (
        "    x = x + y\n",
        "    a, b, c = split(x, [half, half])\n",
        "E0602",
        "",
        "2 results, bound to 3 names",
    ),
    ("    x = x + y\n", "    a, b = silu(x)\n", "E0602", "silu(x)", "one result, bound to 2 names"),
    ("    x = x + y\n", "    a, b = x + y\n", "E0602", "x + y", "one result, bound to 2 names"),
    ("    x = x + y\n", "    a, a = split(x, [half, half])\n", "E0207", "a", "bound twice"),
    ("    x = x + y\n", "    a, b = split(x, [seq, seq])\n", "E0307", "", "a dim of the model"),
]


@pytest.mark.parametrize(
    ("before", "after", "code", "words", "said"), WRONG, ids=[f"{w[2]} {w[1]}" for w in WRONG]
)
def test_what_is_refused(before: str, after: str, code: str, words: str, said: str) -> None:
    text = BRANCHES.replace("dense = 2", "dense = 2  half = 4")
    assert before in text
    with pytest.raises(PlanError) as caught:
        make_program(text.replace(before, after, 1) + trained("one rank"))
    told = {each.code: each for each in reversed(caught.value.diagnostics)}
    assert code in told, str(caught.value)
    first = told[code]
    assert said in str(first)
    line = first.span.text.split("\n")[first.span.line - 1]
    assert not words or line[first.span.column - 1 : first.span.end_column - 1] == words


@pytest.mark.long
def test_a_repeat_has_not_all_too_many_parts() -> None:
    text = BRANCHES.replace("layers = 5", "layers = 9999")
    many = "".join(f"if i < {k} {{}}" for k in range(10, 2000))
    with pytest.raises(PlanError, match="too many parts of repeats"):
        make_program(text.replace("    x = x + y", f"{many} x = x + y") + trained("one rank"))


def test_a_model_does_not_grow_without_end() -> None:
    depth = 20
    dims = "  ".join(f"d{k} = 2" for k in range(depth))
    body = "".join(f"repeat d{k} as i{k} {{ if i{k} < 1 {{ x = tanh(x) }} " for k in range(depth))
    text = f"""{HEAD} dims {{ {DIMS}  {dims} }}  init ~ normal(0.5)  x = embedding(tokens, wte[vocab, hidden])
      {body} x = x + x {"}" * depth}
      loss = cross_entropy(x @ head[hidden -> vocab], labels) }}"""
    with pytest.raises(PlanError, match="too many parts of repeats"):
        make_program(text + trained("one rank"))
