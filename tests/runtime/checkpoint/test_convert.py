"""Checkpoints to torch.distributed.checkpoint and back: bit for bit, or one line that says what
to do.
"""

import json
import multiprocessing
import os
import random
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.programs import load_program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh, RunError
from scalec.runtime.checkpoint import convert, saver
from scalec.runtime.checkpoint.files import Disk
from scalec.runtime.checkpoint.reader import Saved
from scalec.tools.convert.checkpoint_names import checkpoint_names, tables

dcp: Any = checkpoint  # its types are partial
PLANS = Path(__file__).parents[3] / "plans"
TINY = """
use "tiny_llama.scale" { train { seq = 16  global_batch = 4  microbatch = 1 } }
mesh { dp = 1  tp = 1 }
"""


def _plan(text: str, folder: Path, names: str) -> tuple[ModuleType, convert.Contents]:
    """A plan's program, and the description of its checkpoints."""
    path = str(PLANS / "variant.scale")
    program = compile_plan(Source(path, text))
    module = load_program(text, folder, path)
    return module, convert.contents(
        checkpoint_names(program, None if names == "scalec" else tables()[names])
    )


def _saved(module: ModuleType, folder: Path) -> Path:
    """A checkpoint whose values differ everywhere."""
    _, state = module.build(Mesh(module.PLAN.mesh))
    state.initialise(3)
    for number, box in enumerate(state.boxes()):
        if box.key.startswith("optimizer/"):
            generator = torch.Generator().manual_seed(number)
            box.tensor.copy_(torch.rand(box.tensor.shape, generator=generator))
    harness.kept(state)["optimizer/step"].fill_(7)
    return saver.save(folder, 7, state, run={"seed": 5, "model": "a"})


def _values(path: Path) -> dict[str, Tensor]:
    saved = Saved(path)
    return saved.whole([*saved.tensors()])


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[key].dtype, one[key].shape) == (other[key].dtype, other[key].shape)
        and torch.equal(one[key], other[key])
        for key in one
    )


CASES = {
    "adamw": Case(optimizer="adamw", model="tied", padded=True, precision="fp32"),
    "momentum": Case(optimizer="momentum", precision="fp32"),
    "sgd": Case(precision="fp64"),
    "fp16": Case(optimizer="adamw", precision="fp16"),
    "experts": Case(optimizer="adamw", model="biased", precision="bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    module, plan = _plan(plan_text(CASES[name]), tmp_path / "program", "scalec")
    before = _saved(module, tmp_path / "run")
    convert.to_torch(Saved(before), tmp_path / "torch", plan)
    convert.from_torch(
        convert.TorchFolder(tmp_path / "torch"), tmp_path / "other" / "step-000007", plan
    )
    assert _equal(_values(before), _values(tmp_path / "other" / "step-000007"))
    assert Saved(tmp_path / "other" / "step-000007").run == {"seed": 5, "model": "a"}
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["step-000007"]


def test_a_byte_that_differs_in_the_identity_beside_tensors_changes_no_setting(
    tmp_path: Path,
) -> None:
    """It is found, or is one of the text around the settings."""
    file = tmp_path / "scalec.json"
    data = convert._beside({"seed": 5, "lr": 0.01}).encode()
    found = 0
    for place, byte in enumerate(data):
        file.write_bytes(data[:place] + bytes([byte ^ 1]) + data[place + 1 :])
        try:
            assert convert._run_of(tmp_path) == {"seed": 5, "lr": 0.01}
        except RunError as error:
            found += "scalec.json is damaged" in str(error)
    assert found > len(data) / 2


def test_a_plan_in_fp16_has_a_loss_scale_whatever_the_run_had(tmp_path: Path) -> None:
    """A program of torch alone loads all that its state has, or fails."""
    module, _ = _plan(plan_text(CASES["adamw"]), tmp_path / "program", "scalec")
    scaled = compile_plan(
        Source("tiny.scale", plan_text(replace(CASES["adamw"], precision="fp16")))
    )
    plan = convert.contents(checkpoint_names(scaled, None))
    convert.to_torch(Saved(_saved(module, tmp_path / "run")), tmp_path / "torch", plan)
    values = load_file(tmp_path / "torch" / "model.safetensors")
    assert (values["optimizer/loss_scale"], values["optimizer/loss_scale_steps"]) == (2.0**16, 0)


EXPERTS = "heads = 4  experts = 8  expert_ffn = 8  layers = 4"
LATENT = (
    f"q_rank = 8  kv_rank = 8  nope = 8  pe = 4  v_dim = 8  ffn = 32  shared_ffn = 8  {EXPERTS}"
)
PADDED = "vocab = 250 pad 16  heads = 4  layers = 2"
SMALL = {  # models of other structures, with few elements: their dims
    "gpt2": PADDED,
    "llama3_2": f"kv_heads = 2  ffn = 48  {PADDED}",
    "qwen3_moe": f"vocab = 256  kv_heads = 2  head_dim = 8  {EXPERTS}",
    "deepseek_v3": f"vocab = 256  {LATENT}",
}
TRAIN = """
train {
  seq = 16  global_batch = 4  microbatch = 1  steps = 5  precision = fp32
  optimizer adamw { lr = 1e-2 }
  data text { files = [python_stdlib] }
}
"""


def _small(model: str) -> str:
    """The plan of a small model."""
    if model not in SMALL:
        return TINY
    const = "const { chosen = 4 }" * (model == "deepseek_v3")
    return f'use "models/{model}.scale" {{ dims {{ hidden = 32  {SMALL[model]} }} {const} }}{TRAIN}'


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("tiny", "torchtitan"),
        ("gpt2", "hf"),
        ("llama3_2", "torchtitan"),
        pytest.param("qwen3_moe", "torchtitan", marks=pytest.mark.long),
        ("deepseek_v3", "torchtitan"),
        *(
            pytest.param(model, "hf", marks=pytest.mark.long)
            for model in ("tiny", "llama3_2", "qwen3_moe", "deepseek_v3")
        ),
    ],
)
def test_names_of_others_are_there_and_back_the_same(
    model: str, names: str, tmp_path: Path
) -> None:
    """Parts of fused tensors, transposed ones, one for each expert or one of all; tied ones;
    without what pads them.
    """
    module, plan = _plan(_small(model), tmp_path / "program", names)
    before = _saved(module, tmp_path / "run")
    convert.to_torch(Saved(before), tmp_path / "torch", plan)
    convert.from_torch(convert.TorchFolder(tmp_path / "torch"), tmp_path / "step-000007", plan)
    ours, theirs = _values(before), _values(tmp_path / "step-000007")
    padded = {
        key: value
        for key, value in ours.items()
        if "pad" in SMALL.get(model, "") and key.endswith("wte")
    }
    for key, value in padded.items():
        assert not theirs[key][250:].any()
        value[250:] = 0
    assert len(padded) == (3 if model in ("gpt2", "llama3_2") else 0)
    assert _equal(ours, theirs)


def test_a_tied_head_that_differs_is_a_line(tmp_path: Path) -> None:
    module, plan = _plan(_small("llama3_2"), tmp_path / "program", "torchtitan")
    convert.to_torch(Saved(_saved(module, tmp_path / "run")), tmp_path / "torch", plan)
    file = tmp_path / "torch" / "model.safetensors"
    values = load_file(file)
    assert torch.equal(values["output.weight"], values["tok_embeddings.weight"])
    save_file({**values, "output.weight": values["output.weight"] + 1}, file)
    line = "`output.weight` differs from `tok_embeddings.weight`, to which the plan ties it"
    with pytest.raises(RunError, match=re.escape(line)):
        convert.from_torch(convert.TorchFolder(tmp_path / "torch"), tmp_path / "step-000007", plan)


def test_torchtitan_has_heads_as_pairs_and_hugging_face_as_halves(tmp_path: Path) -> None:
    module, hf = _plan(TINY, tmp_path / "program", "hf")
    _, titan = _plan(TINY, tmp_path / "program", "torchtitan")
    before = _saved(module, tmp_path / "run")
    for name, plan in (("hf", hf), ("titan", titan)):
        convert.to_torch(Saved(before), tmp_path / name, plan)
    theirs, values = (load_file(tmp_path / name / "model.safetensors") for name in ("titan", "hf"))
    own = _values(before)
    for there, here in (
        ("tok_embeddings.weight", "wte"),
        ("layers.1.attention.wv.weight", "layers.1.wv"),
        ("layers.1.feed_forward.w2.weight", "layers.1.w_down"),
        ("layers.0.attention_norm.weight", "layers.0.norm1"),
        (
            "optimizer.state.layers.0.ffn_norm.weight.exp_avg_sq",
            "optimizer/exp_avg_sq/layers.0.norm2",
        ),
        ("optimizer.state.output.weight.step", "optimizer/step"),
    ):
        assert torch.equal(theirs[there], own[here])
    for there, here, heads in (("wq", "q_proj", 4), ("wk", "k_proj", 2)):
        for state in ("{}", "optimizer.state.{}.exp_avg"):
            halves = values[state.format(f"model.layers.1.self_attn.{here}.weight")].view(
                heads, 2, 8, 64
            )
            pairs = theirs[state.format(f"layers.1.attention.{there}.weight")].view(heads, 8, 2, 64)
            assert torch.equal(pairs[:, :, 0], halves[:, 0])
            assert torch.equal(pairs[:, :, 1], halves[:, 1])


class _Tree(torch.nn.Module):
    """A module with parameters of these names."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros_like(value)))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def test_a_program_of_torch_goes_on_and_a_run_after_it(tmp_path: Path) -> None:
    """As torchtitan does: torch's own functions give and take the state, of a model with its
    names.
    """
    module, plan = _plan(TINY, tmp_path / "program", "torchtitan")
    before = _saved(module, tmp_path / "run")
    convert.to_torch(Saved(before), tmp_path / "torch", plan)
    params = {
        n: v
        for n, v in load_file(tmp_path / "torch" / "model.safetensors").items()
        if "optimizer" not in n
    }
    model = _Tree(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    state = _state(model, optimizer)
    # of hyperparameters, which are no tensors
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(
        state,
        storage_reader=HuggingFaceStorageReader(str(tmp_path / "torch")),
        planner=planner,
        no_dist=True,
    )
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    assert all(torch.equal(value, params[name]) for name, value in model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dcp.save(_state(model, optimizer), checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert.from_torch(convert.TorchFolder(tmp_path / "theirs"), tmp_path / "step-000008", plan)
    one, other = _values(before), _values(tmp_path / "step-000008")
    assert other["optimizer/step"] == 8
    first = 0.9 * one["optimizer/exp_avg/layers.0.wq"] + 0.1
    assert torch.allclose(other["optimizer/exp_avg/layers.0.wq"], first)
    scaled = (first / (1 - 0.9**8)) / (
        (0.95 * one["optimizer/exp_avg_sq/layers.0.wq"] + 0.05) / (1 - 0.95**8)
    ).sqrt()
    assert torch.allclose(other["layers.0.wq"], one["layers.0.wq"] - 0.01 * scaled, atol=1e-6)


def _folder(tmp_path: Path) -> tuple[Path, convert.Contents, dict[str, Tensor]]:
    """A converted folder that can be spoilt, with its tensors."""
    module, plan = _plan(plan_text(CASES["adamw"]), tmp_path / "program", "scalec")
    convert.to_torch(Saved(_saved(module, tmp_path / "run")), tmp_path / "torch", plan)
    return tmp_path / "torch", plan, load_file(tmp_path / "torch" / "model.safetensors")


def test_a_folder_that_is_not_the_plans_is_a_line(tmp_path: Path) -> None:
    folder, plan, values = _folder(tmp_path)
    state = "optimizer.state.norm.exp_avg"
    cases: tuple[tuple[dict[str, Tensor | None], str], ...] = (
        ({"norm": None}, "lacks `norm`, which the plan needs: is --names right?"),
        (
            {state: None},
            f"lacks `{state}`, which the plan needs: with weights alone, `train.py --init`"
            " begins a run",
        ),
        ({"norm": torch.ones(3)}, ": `norm` is [3], but the plan's is [16]"),
        (
            {state: values[state].double()},
            f": `{state}` is float64, but the plan's masters are float32: a conversion",
        ),
        ({"else": torch.ones(3)}, ": the plan does not use `else`"),
        (
            {"optimizer.state.norm.step": torch.tensor(3.0)},
            ": parameters were updated 3 to 7 times, not alike",
        ),
    )
    for changed, line in cases:
        save_file(
            {n: v for n, v in {**values, **changed}.items() if v is not None},
            folder / "model.safetensors",
        )
        with pytest.raises(
            RunError, match=re.escape(f"{folder}{line if line[0] == ':' else f' {line}'}")
        ):
            convert.from_torch(convert.TorchFolder(folder), tmp_path / "made" / "step-000007", plan)
        assert not (tmp_path / "made").exists()


def test_what_is_no_checkpoint_or_damaged_is_a_line(tmp_path: Path) -> None:
    folder, plan, _ = _folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        RunError, match=r"empty is no checkpoint: it has no index\.json, no \.metadata and no "
    ):
        convert.TorchFolder(tmp_path / "empty")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:1000], whole[:4], b"", b"\xff" * 100):
        file.write_bytes(data)
        with pytest.raises(RunError, match=r"torch is damaged \(.*: take another checkpoint"):
            convert.TorchFolder(folder)
    file.write_bytes(whole)
    for name in ("new", "step-7"):
        with pytest.raises(
            RunError,
            match="name it by the steps that are done, as in runs/NAME/checkpoints/step-000300",
        ):
            convert.from_torch(convert.TorchFolder(folder), tmp_path / name, plan)
    (tmp_path / "step-000007").mkdir()
    with pytest.raises(
        RunError, match="step-000007 is there already: a checkpoint is never written over"
    ):
        convert.from_torch(convert.TorchFolder(folder), tmp_path / "step-000007", plan)
    with pytest.raises(RunError, match="torch is there already: name a new folder"):
        convert.to_torch(Saved(tmp_path / "run" / "step-000007"), folder, plan)


def test_a_save_of_torch_that_was_cut_off_is_not_taken_for_whole(tmp_path: Path) -> None:
    """Torch marks no folder of safetensors as finished: a file that is missing leaves gaps, or
    tensors too small.
    """
    folder, plan, values = _folder(tmp_path)
    parts = {0: slice(0, 3), 3: slice(3, 5), 5: slice(5, None)}
    (folder / "model.safetensors").unlink()
    for first, rows in parts.items():
        here = {
            key: value[rows].clone() if value.ndim else value
            for key, value in values.items()
            if value.ndim or not first
        }
        here = {key: value for key, value in here.items() if value.numel()}
        where = {
            key: {
                "saved_offsets": [first if value.ndim else 0, *[0] * (value.ndim - 1)][: value.ndim]
            }
            for key, value in here.items()
        }
        save_file(
            here, folder / f"shard-{first}.safetensors", {"DCP_SHARDING_INFO": json.dumps(where)}
        )
    convert.from_torch(convert.TorchFolder(folder), tmp_path / "step-000007", plan)
    assert _equal(_values(tmp_path / "run" / "step-000007"), _values(tmp_path / "step-000007"))
    middle = (folder / "shard-3.safetensors").read_bytes()
    (folder / "shard-3.safetensors").unlink()
    with pytest.raises(
        RunError, match="elements are in no part; was the save that wrote it cut off"
    ):
        convert.from_torch(convert.TorchFolder(folder), tmp_path / "step-000008", plan)
    (folder / "shard-3.safetensors").write_bytes(middle)
    (folder / "shard-5.safetensors").unlink()
    with pytest.raises(RunError, match=r"is \[5.*but the plan's is"):
        convert.from_torch(convert.TorchFolder(folder), tmp_path / "step-000008", plan)


def test_a_full_disk_and_a_kill_leave_nothing_by_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plan, _ = _folder(tmp_path)

    class Full(Disk):
        def write(self, file: Any, data: bytes | memoryview) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "Disk", Full)
    with pytest.raises(RunError, match=r"rank-00000\.safetensors: No space left on device"):
        convert.from_torch(convert.TorchFolder(folder), tmp_path / "made" / "step-000007", plan)
    assert not [*(tmp_path / "made").iterdir()]
    monkeypatch.setattr(convert, "Disk", Disk)
    left = multiprocessing.get_context("fork").Process(
        target=_killed, args=(folder, tmp_path / "made", plan)
    )
    left.start()
    left.join()
    assert left.exitcode == -9
    assert saver.checkpoints(tmp_path / "made") == []
    convert.from_torch(convert.TorchFolder(folder), tmp_path / "made" / "step-000007", plan)
    assert [path.name for path in saver.checkpoints(tmp_path / "made")] == ["step-000007"]


def test_a_kill_while_a_folder_is_written_leaves_none_by_its_name(tmp_path: Path) -> None:
    _, plan, values = _folder(tmp_path)
    left = multiprocessing.get_context("fork").Process(
        target=_killed_writing, args=(tmp_path, plan)
    )
    left.start()
    left.join()
    assert left.exitcode == -9
    assert not (tmp_path / "again").exists()
    convert.to_torch(Saved(tmp_path / "run" / "step-000007"), tmp_path / "again", plan)
    assert _equal(load_file(tmp_path / "again" / "model.safetensors"), values)


def _killed_writing(folder: Path, plan: convert.Contents) -> None:
    safetensors.torch.save_file = lambda *_, **__: os.kill(os.getpid(), 9)
    convert.to_torch(Saved(folder / "run" / "step-000007"), folder / "again", plan)


def _killed(folder: Path, made: Path, plan: convert.Contents) -> None:
    class Kill(Disk):
        def rename(self, old: Path, new: Path) -> None:
            os.kill(os.getpid(), 9)

    convert.Disk = Kill
    convert.from_torch(convert.TorchFolder(folder), made / "step-000007", plan)


@pytest.mark.parametrize(
    ("offset", "line"),
    [([-1], "its part [-1:15] lies outside of [16]"), ([0, 0], "torch is damaged (ValueError")],
    ids=["negative", "of other dims"],
)
def test_parts_that_lie_nowhere_are_a_line(offset: list[int], line: str, tmp_path: Path) -> None:
    folder, plan, values = _folder(tmp_path)
    places = {key: {"saved_offsets": [0] * value.ndim} for key, value in values.items()} | {
        "norm": {"saved_offsets": offset}
    }
    save_file(values, folder / "model.safetensors", {"DCP_SHARDING_INFO": json.dumps(places)})
    last = {"DCP_SHARDING_INFO": json.dumps({"norm": {"saved_offsets": [15]}})}
    save_file({"norm": values["norm"][:1].clone()}, folder / "more.safetensors", last)
    with pytest.raises(RunError, match=re.escape(line)):
        convert.from_torch(convert.TorchFolder(folder), tmp_path / "step-000007", plan)


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_whatever_a_header_says_is_read_or_a_line(seeds: range, tmp_path: Path) -> None:
    """Of tensors in parts: their places are JSON in the header, which others may have written."""
    folder, plan, values = _folder(tmp_path)
    file = folder / "model.safetensors"
    places = {key: {"saved_offsets": [0] * value.ndim} for key, value in values.items()}
    save_file(values, file, {"DCP_SHARDING_INFO": json.dumps(places)})
    written = file.read_bytes()
    size = 8 + int.from_bytes(written[:8], "little")
    for seed in seeds:
        chosen, data = random.Random(seed), bytearray(written)
        for _ in range(chosen.randint(1, 3)):
            at = chosen.randrange(size)
            data[at] = chosen.choice([*b'0123456789-[]{}",:.eNa', chosen.randrange(256)])
        file.write_bytes(data)
        with suppress(RunError):
            convert.from_torch(convert.TorchFolder(folder), tmp_path / f"step-{seed:06d}", plan)
