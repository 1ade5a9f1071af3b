"""`interleaved`: heads whose first rows stand pair by pair, with all that it combines with, on
several meshes.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.programs import load_program
from helpers.readback_plans import demand_refused
from scalec.compiler.analysis import verifier
from scalec.compiler.emit.train_py import program_files
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import export, saver
from scalec.runtime.checkpoint.hf_weights import HFWeight, Reader
from scalec.runtime.state.shards import whole

pytestmark = pytest.mark.usefixtures("calls_uncompared")

NAMES = """
  wte  = "wte"
  wpe  = "wpe"
  wq   = interleaved(part(transposed("{i}.qkv"), 0, 3), rotary)
  bq   = interleaved("{i}.bias", 6)
  wk   = interleaved(part(transposed("{i}.qkv"), 1, 3), head_dim)
  wv   = part(transposed("{i}.qkv"), 2, 3)
  wo   = "{i}.out"
"""
PLAN = """
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  heads = 4  kv_heads = 2  head_dim = hidden / heads  layers = 2 }
  const { rotary = 6  half = 0.5 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden]
  repeat layers {
    q = rope(x @ wq[hidden -> heads, head_dim] + bq[heads, head_dim], 10000, rotary)
    k = rope(x @ wk[hidden -> kv_heads, head_dim], 10000)
    o = attention(q, k, x @ wv[hidden -> kv_heads, head_dim], mask=causal)
    x = x + o @ wo[heads, head_dim -> hidden]
  }
  loss = cross_entropy(x @ wte, labels)
}
mesh  { %s }
shard { batch over dp  vocab, heads, kv_heads over tp  seq over tp }
train {
  seq = 16  global_batch = 8  microbatch = 1  steps = 3  precision = fp64
  optimizer sgd { lr = 1e-3 }
  data text { files = ["a"] }
}
names hf {%s}
"""
MESHES = [("dp = 1  tp = 1", 1), ("dp = 2  tp = 2", 4), ("dp = 1  tp = 4", 4)]
ROWS = {
    "wq": [0, 2, 4, 1, 3, 5, 6, 7],
    "bq": [0, 2, 4, 1, 3, 5, 6, 7],
    "wk": [0, 2, 4, 6, 1, 3, 5, 7],
}
"""The place in the file of each row of a head."""

Place = tuple[tuple[int, ...], tuple[slice, ...]]
"""The shape of a whole parameter, and the part of it."""


@pytest.mark.parametrize(("mesh", "ranks"), MESHES)
def test_rows_find_their_place_and_the_way_back(mesh: str, ranks: int, tmp_path: Path) -> None:
    module = load_program(PLAN % (mesh, NAMES), tmp_path)
    tensors = _tensors()
    save_file(tensors, tmp_path / "in.safetensors")
    held = run_ranks(ranks, _saved, module, tmp_path)
    export.export(tmp_path / "step-000000", tmp_path / "out", module.PLAN.names)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], value) for name, value in tensors.items())
    wanted = _parameters(tensors)
    for name, (shape, place), value in (each for rank in held for each in rank):
        assert torch.equal(value, wanted[name].reshape(shape)[place]), name


def _tensors() -> dict[str, Tensor]:
    """What the file holds: of each of 2 layers the heads of q, k and v, 4 + 2 + 2 of them, as
    columns of one matrix.
    """
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"wte": (64, 32), "wpe": (16, 32)}
    for i in range(2):
        shapes |= {f"{i}.qkv": (32, 64), f"{i}.bias": (32,), f"{i}.out": (32, 32)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def _parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of both layers that the file has in another order, whole."""
    found: dict[str, Tensor] = {}
    for i in range(2):
        q, k, _ = tensors[f"{i}.qkv"].T.split([32, 16, 16])
        for name, value in (("wq", q), ("wk", k), ("bq", tensors[f"{i}.bias"])):
            heads = value.reshape(-1, 8, *value.shape[1:])
            found[f"layers.{i}.{name}"] = heads[:, ROWS[name]]
    return found


def _saved(module: ModuleType, folder: Path) -> list[tuple[str, Place, Tensor]]:
    """Reads the weights and saves them; what this rank then has of those in another order, and
    where in the whole.
    """
    _, state = module.build(Mesh(module.PLAN.mesh))
    Reader(folder / "in.safetensors", module.PLAN.names).fill(state)
    saver.save(folder, 0, state)
    boxes = [box for box in state.boxes() if box.key.rpartition(".")[2] in ROWS]
    return [
        (box.key, (box.shape, box.extent.within(whole(box.shape))), box.tensor.clone())
        for box in boxes
    ]


def test_each_rank_reads_its_own_heads_alone() -> None:
    """Of 4 heads over 2 ranks, 16 of 32 rows."""
    stored = HFWeight("q", (32, 5), interleaved=(0, 6, 8))
    rows = torch.arange(160.0).view(32, 5)
    assert torch.equal(stored.halves(rows[16:]), stored.halves(rows)[16:])
    assert stored.halves(rows)[8:16, 0].tolist() == [5 * (8 + row) for row in ROWS["wq"]]
    assert torch.equal(stored.pairs(stored.halves(rows)), rows)


def test_rows_of_a_head_may_precede_its_pairs() -> None:
    stored = HFWeight("q", (16, 1), interleaved=(2, 6, 8))
    rows = torch.arange(16.0).view(16, 1)
    assert stored.halves(rows).flatten().tolist() == [
        0,
        1,
        2,
        4,
        3,
        5,
        6,
        7,
        8,
        9,
        10,
        12,
        11,
        13,
        14,
        15,
    ]
    assert torch.equal(stored.pairs(stored.halves(rows)), rows)


CASES = [  # what is written instead of what, the code, a part of the message
    ("rotary)", "5)", "E0405", "5 rows are no pairs"),
    ("rotary)", "0)", "E0405", "0 rows are no pairs"),
    ("rotary)", "half)", "E0405", "0.5 rows are no pairs"),
    ("rotary)", "10)", "E0405", "a head of `wq` has 8 rows"),
    ("rotary)", "rotated)", "E0404", "this is not a number of rows"),
    ("rotary)", "8MiB)", "E0404", "this is not a number of rows"),
    ('"{i}.out"', 'interleaved("{i}.out", 4)', "E0405", "`wo` has no heads"),
    ("rotary)", "rotary, from=4)", "E0405", "a head of `wq` has 8 rows"),
    ("rotary)", "rotary, from=0)", "E0405", "0 rows cannot be skipped"),
    ("rotary)", "rotary, after=2)", "E0404", "does not name a stored tensor"),
    ('"wte"', 'interleaved("wte", 4)', "E0405", "`wte` has no heads"),
    ('"wpe"', 'interleaved("wpe", 4)', "E0405", "`wpe` has no heads"),
    (
        'interleaved("{i}.bias", 6)',
        'transposed(interleaved("{i}.bias", 6))',
        "E0404",
        "does not name a stored tensor",
    ),
    (
        'interleaved("{i}.bias", 6)',
        'interleaved("{i}.bias")',
        "E0404",
        "does not name a stored tensor",
    ),
]


@pytest.mark.parametrize(("old", "new", "code", "message"), CASES)
def test_each_mistake_is_told(old: str, new: str, code: str, message: str) -> None:
    assert old in NAMES
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("tiny.scale", PLAN % (MESHES[0][0], NAMES.replace(old, new, 1))))
    assert [found.code for found in caught.value.diagnostics] == [code]
    assert message in str(caught.value)


def test_ir_and_program_say_what_the_plan_says() -> None:
    source = Source("tiny.scale", PLAN % (MESHES[1][0], NAMES))
    program = compile_plan(source)
    assert [each.interleaved for each in program.names if each.interleaved] == [6, 6, 8]
    assert read_ir(Source("ir", print_ir(program))) == program
    longer = (evolve(each, interleaved=10 if each.interleaved else 0) for each in program.names)
    with pytest.raises(AssertionError, match="wq: pairs in heads of 8 rows"):
        verifier.check(evolve(program, names=tuple(longer)))
    files = program_files(program, source)
    for old, new in (
        ("[0, 6, 8]", "[0, 4, 8]"),
        ("[0, 8, 8]", "[0, 8, 16]"),
        (', "interleaved": [0, 6, 8]', ""),
        (', "positions": true', ""),
        ('"repeats": {"layers": 2}', '"repeats": {"layers": 3}'),
    ):
        demand_refused(files, program, "hf_names.json", old, new)
