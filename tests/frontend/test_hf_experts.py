"""Files with a tensor for each expert: which names fit, what each rank reads, and the way back."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.programs import load_program
from helpers.readback_plans import demand_refused
from scalec.compiler.emit.train_py import program_files
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh, RunError
from scalec.runtime.checkpoint import export, saver
from scalec.runtime.checkpoint.hf_weights import Reader
from scalec.runtime.state.shards import whole

pytestmark = pytest.mark.usefixtures("calls_uncompared")

NAMES = """
  wte    = "wte"
  router = "{i}.router"
  e_gate = part("{i}.{experts}.gate_up", 0, 2)
  e_up   = part("{i}.{experts}.gate_up", 1, 2)
  e_down = transposed("{i}.{experts}.down")
"""
PLAN = """
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  experts = 4  ffn = 8  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    y = x
    route y to experts by top(y @ router[hidden -> experts], 2) {
      y = (silu(y @ e_gate[hidden -> ffn]) * (y @ e_up[hidden -> ffn])) @ e_down[ffn -> hidden]
    }
    x = x + y
  }
  loss = cross_entropy(x @ wte, labels)
}
mesh  { %s }
shard { experts over ep  %s }
state { %s }
train {
  seq = 16  global_batch = 8  microbatch = 1  steps = 3  precision = fp64
  optimizer sgd { lr = 1e-3 }
  data text { files = ["a"] }
}
names hf {%s}
"""
TOKENS = "batch over dp, ep"
# each with its ranks, the rules besides that of experts, and what of the state is shared out
MESHES = [
    ("dp = 1  ep = 1", 1, TOKENS, ""),
    ("dp = 2  ep = 2", 4, TOKENS, ""),
    ("dp = 2  ep = 2", 4, TOKENS, "zero 3 over dp, ep"),
    ("dp = 2  ep = 2", 4, "batch over ep  ffn over dp", ""),
]
ONE, FOUR = (("dp = 1  ep = 1", TOKENS, ""), ("dp = 2  ep = 2", TOKENS, ""))


@pytest.mark.parametrize(("mesh", "ranks", "shard", "state"), MESHES)
def test_experts_find_their_place_and_the_way_back(
    mesh: str, ranks: int, shard: str, state: str, tmp_path: Path
) -> None:
    module = load_program(PLAN % (mesh, shard, state, NAMES), tmp_path)
    tensors = _tensors()
    save_file(tensors, tmp_path / "in.safetensors")
    held = run_ranks(ranks, _saved, module, tmp_path)
    export.export(tmp_path / "step-000000", tmp_path / "out", module.PLAN.names)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], value) for name, value in tensors.items())
    for name, (shape, place), value in (each for rank in held for each in rank):
        assert torch.equal(value, _parameter(tensors, name).reshape(shape)[place]), name


def _tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"wte": (64, 32)}
    for i in range(2):
        shapes[f"{i}.router"] = (4, 32)
        for expert in range(4):
            own = f"{i}.{expert}."
            shapes |= {f"{own}gate_up": (16, 32), f"{own}down": (8, 32)}
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def _parameter(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A parameter, whole, as the file has it."""
    _, layer, own = name.split(".") if "." in name else ("", "", name)
    if own in ("wte", "router"):
        return tensors[f"{layer}.{own}".removeprefix(".")]
    each = {
        "e_gate": lambda at: tensors[f"{at}.gate_up"][:8],
        "e_up": lambda at: tensors[f"{at}.gate_up"][8:],
        "e_down": lambda at: tensors[f"{at}.down"].T,
    }
    return torch.stack([each[own](f"{layer}.{expert}") for expert in range(4)])


def _saved(
    module: ModuleType, folder: Path
) -> list[tuple[str, tuple[tuple[int, ...], tuple[slice, ...]], Tensor]]:
    """Reads the weights and saves them; what this rank then has, and where in the whole."""
    _, state = module.build(Mesh(module.PLAN.mesh))
    Reader(folder / "in.safetensors", module.PLAN.names).fill(state)
    saver.save(folder, 0, state)
    boxes = [box for box in state.boxes() if not box.key.startswith("optimizer/")]
    return [
        (box.key, (box.shape, box.extent.within(whole(box.shape))), box.tensor.clone())
        for box in boxes
    ]


def test_an_expert_without_its_tensor_is_told(tmp_path: Path) -> None:
    module = load_program(PLAN % (*ONE, NAMES), tmp_path)
    tensors = _tensors()
    del tensors["1.3.down"], tensors["1.2.down"]
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(
        RunError,
        match=r"has no `1.2.down`, `1.3.down`, which the plan needs for `layers.1.e_down`$",
    ):
        Reader(tmp_path / "in.safetensors", module.PLAN.names)


CASES = [  # what is written instead of what, a part of the message
    (
        "{i}.{experts}.down",
        "{i}.down",
        "the tensor of `e_down` is to be named by `i`, `experts` in braces",
    ),
    (
        "{i}.{experts}.down",
        "{experts}.down",
        "the tensor of `e_down` is to be named by `i`, `experts` in braces",
    ),
    ("{i}.{experts}.down", "{i}.{ffn}.down", "declared inside 1 repeats, in a route to `experts`"),
    (
        "{i}.router",
        "{i}.{experts}.router",
        "the tensor of `router` is to be named by `i` in braces",
    ),
    ('"wte"', '"{experts}.wte"', "`wte` is not repeated"),
    ("{i}.{experts}.down", "{i}.{2*experts}.down", "cannot be a tensor's name"),
]


@pytest.mark.parametrize(("old", "new", "message"), CASES)
def test_each_mistake_is_told(old: str, new: str, message: str) -> None:
    assert old in NAMES
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("tiny.scale", PLAN % (*ONE, NAMES.replace(old, new, 1))))
    assert [found.code for found in caught.value.diagnostics] == ["E0405"]
    assert message in str(caught.value)


def test_layers_with_experts_may_begin_later() -> None:
    """As in models whose first layers have none."""
    route, rest = (
        PLAN.split("    y = x\n")[1].split("  }\n  loss")[0],
        "x = x + x @ square[hidden -> ffn] @ down[ffn -> hidden]",
    )
    text = PLAN.replace(f"    y = x\n{route}", f"if i < 1 {{ {rest} }} else {{ y = x\n{route} }}\n")
    names = f'{NAMES}  square = "{{i}}.square"\n  down = "{{i}}.d"\n'
    text = text.replace("repeat layers {", "repeat layers as i {").replace(
        "layers = 2", "layers = 3"
    )
    program = compile_plan(Source("tiny.scale", text % (*ONE, names)), "resolve")
    assert {each.param: each.tensor for each in program.names}["e_down"] == "{i+1}.{experts}.down"


def test_ir_and_program_say_what_the_plan_says() -> None:
    source = Source("tiny.scale", PLAN % (*FOUR, NAMES))
    program = compile_plan(source)
    assert read_ir(Source("ir", print_ir(program))) == program
    files = program_files(program, source)
    for old, new in (
        ('"each": ["experts", 4]', '"each": ["experts", 2]'),
        (', "each": ["experts", 4]', ""),
    ):
        demand_refused(files, program, "hf_names.json", old, new)
