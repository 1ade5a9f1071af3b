"""Models of transformers and the plans imported for them: same weights, same loss, same
gradients.
"""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor

from helpers import hf_models
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.programs import import_module, load_program, write_program
from scalec.compiler.analysis.communication import parameter_count
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh
from scalec.runtime.checkpoint.hf_weights import Reader

pytestmark = pytest.mark.usefixtures("calls_uncompared")

PLANS = Path(__file__).parents[3] / "plans"
# each with its data-parallel degree and its ranks; 4 are more than there are key/value heads
MESHES = {
    "one": ("dp = 1  tp = 1", 1, 1),
    "dp_2_tp_2": ("dp = 2  tp = 2", 2, 4),
    "tp_4": ("dp = 1  tp = 4", 1, 4),
    "cp_2_tp_2": ("dp = 1  cp = 2  tp = 2", 1, 4),
}
AUX_BATCH = 2
"""Sequences of a forward of transformers, over which it takes the routers' loss; microbatches
have two or four.
"""

TOLERANCE = 1e-9
# a bias of keys has no gradient where positions are learned: scores of a query change alike
ZERO = 1e-15


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The gradients travel as the weights do: from a file under their names, each rank's part
    to the rank.
    """
    model = hf_models.model(name, torch.float64)
    model.save_pretrained(tmp_path)
    rows = AUX_BATCH if name.endswith("_aux") else 0
    loss, gradients = hf_models.loss_and_gradients(model, *hf_models.batch(), rows_of_forward=rows)
    save_file(gradients, tmp_path / "gradients.safetensors")
    for mesh, (axes, dp, ranks) in MESHES.items():
        text = hf_models.plan(tmp_path, axes, dp).replace("aux_batch=1", f"aux_batch={AUX_BATCH}")
        assert ("aux_loss=0.5" in text) == (rows > 0)
        folder = write_program(text, tmp_path / mesh)
        module = import_module(folder / "train.py")
        results = run_ranks(ranks, _differences, module, tmp_path)
        assert [found for found, _ in results] == [pytest.approx(loss, rel=TOLERANCE)] * ranks
        for parameter in results[0][1]:
            errors, sizes = zip(
                *(differences[parameter] for _, differences in results), strict=True
            )
            allowed = TOLERANCE * max(sizes) + ZERO
            assert max(errors) <= allowed, f"{mesh}: gradient of {parameter}: {max(errors):.3g}"


def test_distilbert_has_as_many_parameters() -> None:
    """With its head, and without."""
    with torch.device("meta"):
        made = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig())
    sizes = [sum(each.numel() for each in part.parameters()) for part in (made, made.distilbert)]
    assert sizes == [66_985_530, 66_362_880]
    program = compile_plan(load(PLANS / "distilbert_base.scale"), "resolve")
    head = evolve(
        program, params=tuple(p for p in program.params if re.search("_head|_vocab", p.name))
    )
    assert [parameter_count(program), parameter_count(program) - parameter_count(head)] == sizes


def test_gptj_has_as_many_parameters() -> None:
    with torch.device("meta"):
        made = transformers.GPTJForCausalLM(transformers.GPTJConfig())
    assert sum(each.numel() for each in made.parameters()) == 6_050_882_784
    assert parameter_count(compile_plan(load(PLANS / "gptj_6b.scale"), "resolve")) == 6_050_882_784


def test_gptj_is_another_model_with_its_rows_as_files_have_them(tmp_path: Path) -> None:
    model = hf_models.model("gptj", torch.float64)
    model.save_pretrained(tmp_path)
    loss, _ = hf_models.loss_and_gradients(model, *hf_models.batch())
    text, found = re.subn(
        r"interleaved\((.*), rotary\)", r"\1", hf_models.plan(tmp_path, MESHES["one"][0], 1)
    )
    assert found == 2
    module = load_program(text, tmp_path / "plain")
    ((other,),) = run_ranks(1, _losses, module, tmp_path)
    assert abs(other - loss) > 1e-4


def _losses(module: ModuleType, folder: Path) -> list[float]:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    Reader(folder / "model.safetensors", module.PLAN.names).fill(state)
    return [
        module.eval_step(
            model, state, harness.local_batch(module.PLAN, *hf_models.batch())
        ).loss.item()
    ]


def _differences(module: ModuleType, folder: Path) -> tuple[float, dict[str, tuple[float, float]]]:
    """This rank's loss; of each gradient the largest error and the largest element."""
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    Reader(folder / "model.safetensors", module.PLAN.names).fill(state)
    state.update = lambda *args, **options: None  # leaves the gradients
    metrics = module.train_step(
        model, state, harness.local_batch(module.PLAN, *hf_models.batch()), 0.1
    )
    wanted, expected = module.build(mesh)
    Reader(folder / "gradients.safetensors", module.PLAN.names).fill(expected)
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    return metrics.loss.item(), {
        name: _difference(parameter.grad, want) for (name, parameter), want in pairs
    }


def _difference(got: Any, want: Tensor) -> tuple[float, float]:
    return (got - want).abs().max().item(), want.abs().max().item()
