"""`names hf`: mistakes get their code at the words that are wrong; the IR and the program say
what the plan says.
"""

import json

import pytest

from helpers.programs import make_program
from helpers.readback_plans import demand_refused
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.train_py import program_files
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime.checkpoint.hf_weights import HFWeight

NAMES = """
  wte  = "wte.weight"
  wq   = part(transposed("h.{2*i+1}.attn.weight"), 0, 3)
  wk   = part(transposed("h.{2*i+1}.attn.weight"), 1, 3)
  wv   = part(transposed("h.{2*i+1}.attn.weight"), 2, 3)
  bq   = "h.{i}.bias"
  wo   = "h.{i}.out.weight"
  head = "head.weight"
"""
PLAN = """
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  heads = 4  kv_heads = 2  head_dim = hidden / heads  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    q = x @ wq[hidden -> heads, head_dim] + bq[heads, head_dim]
    o = attention(q, x @ wk[hidden -> kv_heads, head_dim], x @ wv[hidden -> kv_heads, head_dim], mask=causal)
    x = x + o @ wo[heads, head_dim -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { dp = 2  tp = 2 }
shard { batch over dp  vocab, heads, kv_heads over tp  seq over tp }
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 3
  optimizer sgd { lr = 1e-3 }
  data text { files = ["a"] }
}
names hf {%s}
"""

CASES = [  # what is written instead of what, the code, a part of the message
    ("  wte  =", "  wta  =", "E0201", "there is no parameter `wta`"),
    ('  wo   = "h.{i}.out.weight"\n', "", "E0402", "`names hf` lacks `wo`"),
    ("  wo   =", '  wo   = "a.{i}"\n  wo   =', "E0403", "`wo` is given twice"),
    ("h.{i}.out.weight", "h.{i}.bias", "E0403", "`h.{i}.bias` does not hold both"),
    ("1, 3)", "0, 3)", "E0403", "does not hold both"),
    ("2, 3)", "2, 4)", "E0403", "does not hold both"),
    ('"h.{i}.bias"', 'part("h.{i}.bias", 0, 2)', "E0405", "no parameter is part 1 of `h.{i}.bias`"),
    ("1, 3)", "3, 3)", "E0405", "parts of 3 are counted from 0 to 2"),
    ("h.{i}.bias", "h.0.bias", "E0405", "the tensor of `bq` is to be named by `i` in braces"),
    ("wte.weight", "wte.{i}.weight", "E0405", "`wte` is not repeated"),
    ("h.{i}.bias", "h.{i+}.bias", "E0405", "cannot be a tensor's name"),
    ("h.{i}.bias", "h. {i}.bias", "E0405", "cannot be a tensor's name"),
    ('"h.{i}.bias"', "bias", "E0404", "this does not name a stored tensor"),
    ('"h.{i}.bias"', 'halved("h.{i}.bias")', "E0404", "this does not name a stored tensor"),
    ("  bq   =", "  bq over", "E0406", "`names` has settings only"),
    ('"head.weight"', 'transposed("head.weight")', "", ""),
]


@pytest.mark.parametrize(("old", "new", "code", "message"), CASES)
def test_each_mistake_is_told(old: str, new: str, code: str, message: str) -> None:
    assert NAMES.count(old) >= 1
    names = NAMES.replace(old, new)
    if "over" in new:
        names = names.replace('over "h.{i}.bias"', "over tp")
    if not code:
        make_program(PLAN % names)
        return
    with pytest.raises(PlanError) as caught:
        make_program(PLAN % names)
    assert code in {found.code for found in caught.value.diagnostics}
    assert message in str(caught.value)


def test_another_form_of_files_is_an_error() -> None:
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("tiny.scale", (PLAN % NAMES).replace("names hf", "names gguf")))
    assert [found.code for found in caught.value.diagnostics] == ["E0406"]


def test_names_read_back_from_ir() -> None:
    program = make_program(PLAN % NAMES)
    assert len(program.names) == 7
    assert read_ir(Source("ir", print_ir(program))) == program


WRONG = [
    ('"h.{2*i+1}.attn.weight"', '"h.{i}.attn.weight"'),
    (', "start": 32', ""),
    ('"start": 48', '"start": 47'),
    (', "transposed": true', ""),
    ("[32, 64]", "[64, 32]"),
    ('"layers.*.wk"', '"layers.*.wx"'),
    ('"float32"', '"bfloat16"'),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_program_that_says_otherwise_is_refused(old: str, new: str) -> None:
    program = make_program(PLAN % NAMES)
    demand_refused(
        program_files(program, Source("tiny.scale", PLAN % NAMES)),
        program,
        "hf_names.json",
        old,
        new,
    )


def test_indices_become_numbers() -> None:
    stored = HFWeight("a.{i}.b.{6*i+j}.c.{2*j+1}", (1,))
    assert stored.get_tensor_names([3, 5]) == ("a.3.b.23.c.11",)
    each = HFWeight("{experts}.a.{i}.b.{experts}", (1,), each=("experts", 2))
    assert each.get_tensor_names([3]) == ("0.a.3.b.0", "1.a.3.b.1")


def test_a_plan_without_names_has_the_names_of_its_parameters() -> None:
    source = Source("tiny.scale", (PLAN % NAMES).split("names hf")[0])
    program = compile_plan(source)
    files = program_files(program, source)
    check(files["train.py"], program)
    weights = json.loads(files["hf_names.json"])["weights"]
    own = {pattern: pattern.replace("*", "{i}") for pattern in weights}
    assert {pattern: place["tensor"] for pattern, place in weights.items()} == own
    assert "layers.*.wq" in own
    for old, new in (('"layers.{i}.wk"', '"layers.{i}.wv"'), ('"float32"', '"bfloat16"')):
        demand_refused(files, program, "hf_names.json", old, new)
