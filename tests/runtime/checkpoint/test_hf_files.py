"""Weights in and out: what comes out is bit for bit what went in; files that are not the plan's
are one clear line.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import hf_models
from helpers.forked_ranks import run_ranks
from helpers.launched import run_file
from helpers.programs import import_module, load_program, write_program
from scalec.runtime import Mesh, RunError
from scalec.runtime.checkpoint import export, saver
from scalec.runtime.checkpoint.hf_weights import INDEX, Reader

pytestmark = pytest.mark.usefixtures("calls_uncompared")

BIAS = "e_score_correction_bias"
"""In the names of tensors that files hold in float32, as DeepSeek's do."""

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "precision"), [(name, "bf16") for name in hf_models.CONFIGS] + [("llama", "fp32")]
)
def test_what_comes_out_is_what_went_in(name: str, precision: str, tmp_path: Path) -> None:
    hf_models.model(name, PRECISIONS[precision]).save_pretrained(tmp_path / "in")
    text = hf_models.plan(tmp_path / "in", "dp = 2  tp = 2", 2, precision)
    module = load_program(text, tmp_path / "program")
    run_ranks(4, _saved, module, tmp_path / "in", tmp_path / "checkpoints")
    export.export(tmp_path / "checkpoints" / "step-000000", tmp_path / "out", module.PLAN.names)
    masters = replace(module.PLAN.names, dtype=torch.float32)
    export.export(tmp_path / "checkpoints" / "step-000000", tmp_path / "masters", masters)
    before, after, kept = (
        load_file(tmp_path / name / "model.safetensors") for name in ("in", "out", "masters")
    )
    assert all(_bits(kept[key]) == _bits(before[key].float()) for key in before)
    assert before.keys() == after.keys()
    assert all(
        _bits(before[key].float() if BIAS in key else before[key]) == _bits(after[key])
        for key in before
    )


def _saved(module: ModuleType, weights: Path, checkpoints: Path) -> None:
    _, state = module.build(Mesh(module.PLAN.mesh))
    Reader(weights, module.PLAN.names).fill(state)
    saver.save(checkpoints, 0, state)


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_run_begins_with_weights_and_leaves_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From files in several pieces, over a training of two steps, to files that transformers
    reads.
    """
    hf_models.model("qwen3", torch.float32).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert (tmp_path / "in" / INDEX).exists()
    plan = hf_models.plan(tmp_path / "in", "dp = 1  tp = 1", 1, "fp32")
    (tmp_path / "corpus").write_bytes(bytes(range(hf_models.VOCAB)) * 20)
    folder = write_program(plan, tmp_path / "program")

    assert "beginning with ../in" in _run(folder, "--init ../in --data ../corpus")
    again = _run(folder, "--resume --init ../in --data ../corpus", status=2)
    assert (
        again == "error: --init begins a run and --resume goes on with one: choose one, or --resume"
        " auto\n"
    )
    _run(folder, "--export ../out")
    there = _run(folder, "--export ../out", status=2)
    assert there == "error: ../out is there already: name a new folder\n"
    below = _run(folder, "--export ../corpus/below", status=2)
    assert re.fullmatch(
        r"error: cannot write to \.\./corpus/below: /.*/corpus: it is a file\n", below
    )

    _run(folder, "--export ../half --export-dtype bf16")
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "half"))
    assert all(_bits(half[name]) == _bits(value.bfloat16()) for name, value in whole.items())
    alone = _run(folder, "--export-dtype bf16", status=2)
    assert alone == "error: --export-dtype says how weights are written: it needs --export\n"

    before, after = (
        transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
        for _ in "io"
    )
    after.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    assert before.model.norm.weight.shape == after.model.norm.weight.shape
    assert not torch.equal(before.model.norm.weight, after.model.norm.weight)

    monkeypatch.setattr(export, "LARGEST", 20_000)
    module = import_module(folder / "train.py")
    saved = saver.newest(folder / "runs" / "tiny" / "checkpoints")
    assert saved
    (tmp_path / "pieces.tmp").mkdir()
    export.export(saved, tmp_path / "pieces", module.PLAN.names)
    assert (tmp_path / "pieces.tmp").is_dir()  # nobody's but the user's
    assert {path.stat().st_mode for path in (tmp_path / "pieces").iterdir()} == {
        (tmp_path / "corpus").stat().st_mode
    }
    index = json.loads((tmp_path / "pieces" / INDEX).read_text())
    assert len({*index["weight_map"].values()}) > 1
    assert index["metadata"]["total_size"] == sum(
        each.nbytes for each in after.state_dict().values()
    ) - (after.lm_head.weight.nbytes)
    (tmp_path / "pieces" / "config.json").write_bytes(
        (tmp_path / "in" / "config.json").read_bytes()
    )
    read = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "pieces", dtype=torch.float32)
    assert all(
        torch.equal(value, after.state_dict()[name]) for name, value in read.state_dict().items()
    )


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_models.model("llama", torch.float32).save_pretrained(tmp_path / "in")
    text = hf_models.plan(tmp_path / "in", "dp = 1  tp = 1", 1, "fp32")
    module = load_program(text, tmp_path / "program")
    _saved(module, tmp_path / "in", tmp_path / "checkpoints")
    before = sorted(tmp_path.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        export.export(tmp_path / "checkpoints" / "step-000000", tmp_path / "out", module.PLAN.names)
    assert sorted(tmp_path.iterdir()) == before


def _run(folder: Path, options: str, status: int = 0) -> str:
    """What the program in `folder` says: its errors, or else its output."""
    ((ended, errors),) = run_file(folder, 1, f"--device=cpu {options}")
    assert ended == status, errors
    return errors if status else (folder / "out0").read_text()


def test_files_of_gpt2_without_its_head(tmp_path: Path) -> None:
    """The published ones: names begin one word later, and causal masks stand among the weights."""
    model = hf_models.model("gpt2", torch.float64)
    model.save_pretrained(tmp_path)
    module = load_program(hf_models.plan(tmp_path, "dp = 1  tp = 1", 1), tmp_path)
    bare = {
        name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()
    }
    del bare["lm_head.weight"]
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "bare.safetensors")
    _, state = module.build(Mesh(module.PLAN.mesh))
    Reader(tmp_path / "bare.safetensors", module.PLAN.names).fill(state)
    values = state.state_dict()
    assert torch.equal(values["layers.1.wk"], model.transformer.h[1].attn.c_attn.weight[:, 32:64].T)
    assert torch.equal(values["wte"][:100], model.transformer.wte.weight)
    assert not values["wte"][100:].any()


def test_a_tied_head_may_be_stored_beside_its_embedding(tmp_path: Path) -> None:
    """Some programs save it twice; one that differs is another model's."""
    hf_models.model("gpt2", torch.float64).save_pretrained(tmp_path)
    module = load_program(hf_models.plan(tmp_path, "dp = 1  tp = 1", 1), tmp_path)
    path, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    head = tensors["transformer.wte.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path)
    Reader(path, module.PLAN.names)
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, path)
    with pytest.raises(RunError, match="lm_head"):
        Reader(path, module.PLAN.names)


def test_masks_and_frequencies_of_gpt_neox_are_no_weights(tmp_path: Path) -> None:
    """The published files have them; newer ones do not."""
    hf_models.model("gpt_neox", torch.float64).save_pretrained(tmp_path)
    module = load_program(hf_models.plan(tmp_path, "dp = 1  tp = 1", 1), tmp_path)
    buffers = ("bias", "masked_bias", "rotary_emb.inv_freq")
    more = {f"gpt_neox.layers.0.attention.{name}": torch.ones(2) for name in buffers}
    save_file({**load_file(tmp_path / "model.safetensors"), **more}, tmp_path / "model.safetensors")
    _, state = module.build(Mesh(module.PLAN.mesh))
    Reader(tmp_path, module.PLAN.names).fill(state)


Tensors = dict[str, Tensor]
WRONG: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("lm_head.weight"), "has no `lm_head.weight`, which the plan needs for `head`"),
    (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        "`model.norm.weight` is [31], but the plan's is [32]",
    ),
    (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
        "the plan does not use `model.layers.2.mlp.up_proj.weight`",
    ),
    (
        lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
        "`model.norm.weight` is I8, which is not one of F64, F32, F16, BF16",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_files_that_are_not_the_plans(
    change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    hf_models.model("llama", torch.float32).save_pretrained(tmp_path)
    module = load_program(hf_models.plan(tmp_path, "dp = 1  tp = 1", 1), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RunError) as caught:
        Reader(tmp_path, module.PLAN.names)
    assert message in str(caught.value)


def test_no_files_and_no_such_files(tmp_path: Path) -> None:
    for content in (None, b"", b"{}"):
        if content is not None:
            (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(RunError, match="cannot read"):
            Reader(tmp_path, None)  # type: ignore[arg-type] the files come first


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Entry not found</body></html>\n"


def _moved(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def _renamed(folder: Path, rename: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(file).items()}, file)


def _tied(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(
        {name: value for name, value in load_file(file).items() if name != "lm_head.weight"}, file
    )


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


FOREIGN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "pointer": (
        lambda folder: (folder / "model.safetensors").write_bytes(POINTER),
        [
            "model.safetensors: it is a pointer of Git LFS in place of the file itself",
            "git lfs pull",
        ],
    ),
    "page": (
        lambda folder: (folder / "model.safetensors").write_bytes(PAGE),
        ["model.safetensors: it is a web page (HTML)", "download it once more"],
    ),
    "pickle alone": (
        _pickled,
        ["it has `pytorch_model.bin` and no safetensors", 'save_pretrained("safe")'],
    ),
    "pickle by another name": (
        lambda folder: torch.save({"a": torch.ones(1)}, folder / "model.safetensors"),
        ["model.safetensors: it is a file of torch.save", 'save_pretrained("safe")'],
    ),
    "one file by another name": (
        lambda folder: _moved(folder, "consolidated.safetensors"),
        [
            "it has `consolidated.safetensors` in place of `model.safetensors`",
            "name that file by --init",
        ],
    ),
    "parts without an index": (
        lambda folder: (
            [shutil.copy(folder / "model.safetensors", folder / f"{n}.safetensors") for n in "ab"]
            and (folder / "model.safetensors").unlink()
        ),
        ["it has `a.safetensors`, `b.safetensors`, and lacks `model.safetensors.index.json`"],
    ),
    "checkpoints of a run": (
        lambda folder: [_moved(folder, "gone"), (folder / "checkpoints").mkdir()],
        ["it has checkpoints of a run", "--export DIR"],
    ),
    "index is a pointer": (
        lambda folder: (folder / INDEX).write_bytes(POINTER),
        [f"{INDEX} is damaged, or no index of weights: it is a pointer of Git LFS"],
    ),
    "names with a prefix": (
        lambda folder: _renamed(folder, lambda name: f"module.{name}"),
        ["its names are the plan's behind the prefix `module.`", "name.removeprefix('module.')"],
    ),
    "names without a prefix": (
        lambda folder: _renamed(folder, lambda name: name.removeprefix("model.")),
        ["its names lack the prefix `model.` of the plan's", "'model.' + name"],
    ),
    "tied": (
        _tied,
        ["has no `lm_head.weight`", "its model seems to tie `head` to `model.embed_tokens.weight`"],
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_another_kind_are_said_with_what_to_do(name: str, tmp_path: Path) -> None:
    hf_models.model("llama", torch.float32).save_pretrained(tmp_path)
    module = load_program(hf_models.plan(tmp_path, "dp = 1  tp = 1", 1), tmp_path)
    change, words = FOREIGN[name]
    change(tmp_path)
    with pytest.raises(RunError) as caught:
        Reader(tmp_path, module.PLAN.names)
    for each in words:
        assert each in str(caught.value)
    assert str(tmp_path) in str(caught.value).splitlines()[0]
