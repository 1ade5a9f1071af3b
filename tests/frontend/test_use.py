"""Which file `use` takes: one beside the plan, one of any folder, one that comes with scalec."""

from pathlib import Path

import pytest

from scalec.compiler.emit.train_py import train_py
from scalec.compiler.frontend import resolve
from scalec.compiler.frontend.load_plan import gather
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.diagnostics import Diagnostics, PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"
TRAIN = """
train {
  seq = 8  global_batch = 8  microbatch = 8  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = [python_stdlib] }
}
"""
DIMS = "{ dims { vocab = 256  hidden = 64  heads = 4  kv_heads = 2  ffn = 192  layers = 2 } }"


def wrong(plan: Path, text: str) -> str:
    plan.write_text(text)
    with pytest.raises(PlanError) as error:
        resolve(load(plan))
    return str(error.value)


@pytest.mark.parametrize("used", ["scalec:models/llama.scale", f"{PLANS}/models/llama.scale"])
def test_a_model_of_any_folder(used: str, tmp_path: Path) -> None:
    plan = tmp_path / "mine.scale"
    plan.write_text(f'use "{used}" {DIMS}{TRAIN}')
    assert compile_plan(load(plan)).name == "llama"


def test_a_used_file_of_the_plans_name_is_shown_with_its_folder(tmp_path: Path) -> None:
    plan = tmp_path / "llama.scale"
    plan.write_text(f'use "scalec:models/llama.scale" {DIMS}{TRAIN}')
    program = resolve(load(plan))
    assert str(program.param("wte").span) == "models/llama.scale:19"
    text = print_ir(program)
    assert print_ir(read_ir(Source("llama.ir", text))) == text
    assert "  models/llama.scale:21\n" in train_py(compile_plan(load(plan)), load(plan))


def test_every_plan_that_ships_can_be_used(tmp_path: Path) -> None:
    plan = tmp_path / "mine.scale"
    for path in sorted(PLANS.rglob("*.scale")):
        plan.write_text(f'use "scalec:{path.relative_to(PLANS)}"')
        assert gather(load(plan), Diagnostics()).model.name.span.path.startswith(str(PLANS))


def test_what_does_not_ship(tmp_path: Path) -> None:
    said = wrong(tmp_path / "mine.scale", 'use "scalec:models/lama.scale"')
    assert "`scalec:models/lama.scale` is not part of scalec" in said
    assert "did you mean `scalec:models/llama.scale`?" in said
    assert "`scalec:models/gpt2.scale`" in wrong(tmp_path / "mine.scale", 'use "scalec:?"')
    assert "E0205" in wrong(tmp_path / "mine.scale", 'use "scalec:../pyproject.toml"')


def test_a_plan_without_a_model_is_told_of_one_that_ships(tmp_path: Path) -> None:
    assert 'or `use "scalec:models/llama.scale"`' in wrong(tmp_path / "mine.scale", TRAIN)


def test_files_do_not_use_one_another_in_a_circle(tmp_path: Path) -> None:
    said = wrong(tmp_path / "mine.scale", f'use "{tmp_path}/mine.scale"')
    assert "files cannot use one another in a cycle" in said


def test_data_and_optimizer_of_another_kind_take_the_place_of_the_used_ones(tmp_path: Path) -> None:
    plan = tmp_path / "mine.scale"
    plan.write_text(
        f'use "{PLANS}/tiny_llama.scale" '
        '{ train { optimizer sgd { lr = 0.1 }  data tokens { files = ["a.bin"]  dtype = uint32'
        " } } }"
    )
    train = resolve(load(plan)).train
    assert (train.optimizer.kind, train.optimizer.lr, train.optimizer.clip) == ("sgd", 0.1, 0.0)
    assert (train.data.kind, train.data.files, train.data.holdout) == ("tokens", ("a.bin",), 0.0)
    plan.write_text(
        f'use "{PLANS}/tiny_llama.scale" {{ train {{ optimizer adamw {{ lr = 0.1 }} }} }}'
    )
    assert (resolve(load(plan)).train.optimizer.clip, resolve(load(plan)).train.optimizer.lr) == (
        1.0,
        0.1,
    )
