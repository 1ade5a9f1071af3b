"""Emitted programs for the benchmarks: a plan of given sizes, compiled by `scalec compile` and
imported.

Non-goals: models other than `plans/models/llama.scale`, which `plain.py` holds beside it.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scalec.runtime import Batch, Mesh

MODELS = Path(__file__).parent.parent / "plans" / "models"
COMPILE = (
    sys.executable,
    "-c",
    "import sys; from scalec.compiler.cli import main; sys.exit(main())",
    "compile",
)
BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a Llama and of its step; `rows` are a microbatch's sequences on one rank."""

    vocab: int = 256
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    seq: int
    rows: int
    microbatches: int = 1


def program(
    sizes: Sizes,
    mesh: Mapping[str, int],
    sequence_parallel: bool = False,
    state: str = "",
    train: str = "precision = fp32",
    gpu: str = "",
) -> ModuleType:
    """The program for these sizes on a mesh of axes `dp` and `tp`, or on one rank where it has
    none.

    `state` is what the plan says of optimizer state, `train` of precision and kernels, `gpu` the
    name of the GPU.
    """
    return compiled(_plan(sizes, mesh, sequence_parallel, state, train, gpu))[0]


def accounted(sizes: Sizes, train: str, gpu: str) -> tuple[ModuleType, dict[str, Any]]:
    """That for one rank, and what `plan.json` says of its memory."""
    module, plan = compiled(_plan(sizes, {}, False, "", train, gpu))
    return module, plan["memory"]


def compiled(plan: str) -> tuple[ModuleType, dict[str, Any]]:
    """The result of `scalec compile`: the program, and `plan.json`."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").symlink_to(MODELS.resolve())
        (folder / "llama.scale").write_text(plan)
        return loaded(folder, folder / "llama.scale"), json.loads(
            (folder / "out" / "plan.json").read_text()
        )


def loaded(folder: Path, plan: Path) -> ModuleType:
    """The program of a plan, compiled to `folder/out`."""
    subprocess.run([*COMPILE, plan, "-o", folder / "out"], check=True, stdout=subprocess.DEVNULL)
    return imported(folder / "out" / "train.py")


def _plan(
    sizes: Sizes, mesh: Mapping[str, int], sequence_parallel: bool, state: str, train: str, gpu: str
) -> str:
    names = ("vocab", "hidden", "heads", "kv_heads", "head_dim", "ffn", "layers")
    dims = "  ".join(f"{name} = {getattr(sizes, name)}" for name in names)
    axes = "  ".join(f"{axis} = {size}" for axis, size in mesh.items())
    rules = (
        "batch over dp  vocab, heads, kv_heads, ffn over tp "
        f" {'seq over tp' if sequence_parallel else ''}"
    )
    return f"""use "models/llama.scale" {{ dims {{ {dims} }} }}
{f"cluster {{ gpu = {gpu} }}" if gpu else ""}
mesh {{ {axes} }}
{f"shard {{ {rules} }}" if mesh else ""}
state {{ {state} }}
train {{
  seq = {sizes.seq}
  global_batch = {sizes.rows * sizes.microbatches * mesh.get("dp", 1)}  microbatch = {sizes.rows}
  steps = 100  seed = 0  {train}
  optimizer adamw {{
    lr = 1e-3  betas = [{BETAS[0]}, {BETAS[1]}]
    eps = {EPS}  weight_decay = {WEIGHT_DECAY}  clip = {CLIP}
  }}
  data text {{ files = [python_stdlib]  tokenizer = bytes }}
}}
"""


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("emitted_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_rows(sizes: Sizes, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one rank's step, [microbatches, rows, seq]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(
        sizes.vocab, (sizes.microbatches, sizes.rows, sizes.seq + 1), generator=generator
    )
    return rows[..., :-1], rows[..., 1:]


def batch(program: ModuleType, tokens: Tensor, labels: Tensor) -> Batch:
    """[microbatches, rows, seq] in the layout in which the program takes its inputs."""
    laid_out = program.PLAN.inputs["tokens"].dims == ("batch", "seq")
    return Batch(
        *(rows.contiguous() if laid_out else rows.mT.contiguous() for rows in (tokens, labels))
    )


def initial(sizes: Sizes) -> dict[str, Tensor]:
    """The parameters with which emitted programs of these sizes begin, whatever their mesh, and
    optimizer state.
    """
    _, state = program(sizes, mesh={}).build(Mesh({}))
    state.initialise(0)
    return state.state_dict()
