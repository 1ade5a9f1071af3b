"""Programs of torch alone as text: word for word, without the runtime; what is refused, and the
calls that fail.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from end_to_end.test_stages import CASES, MODELS, plan_of
from helpers.forked_ranks import run_ranks
from helpers.oracle.plans import Case, plan_text
from helpers.random_models import own_ops
from helpers.torch_target import files_of, load_torch_program, text_of
from scalec.codegen_templates.torch_ops import recompute
from scalec.compiler.emit.dtensor import emit, for_torch, refusals
from scalec.compiler.emit.dtensor.refusals import REFUSALS
from scalec.compiler.frontend import resolve
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("state", ["", "zero 3 over dp"])
def test_the_program_reads_as_it_did(state: str, golden: Callable[[str, str], None]) -> None:
    case = Case(
        dp=2,
        tp=2,
        sp=True,
        microbatches=2,
        optimizer="adamw",
        clip=1.0,
        state=state,
        precision="fp32",
    )
    golden(f"dtensor/{'zero_3' if state else 'plain'}.py", text_of(plan_text(case)))


def test_a_pipeline_reads_as_it_did(golden: Callable[[str, str], None]) -> None:
    case = Case(
        pp=2,
        dp=2,
        tp=2,
        sp=True,
        layers=4,
        microbatches=4,
        schedule="zbv",
        optimizer="adamw",
        state="zero 1 over dp",
    )
    files = files_of(plan_text(case))
    for name in ("train.py", "schedule.csv"):
        golden(f"dtensor/pipeline/{name}", files[name])


def test_a_value_that_a_stage_passes_on_is_copied() -> None:
    """It enters recomputed layers, and torch detaches in place what a stage returns where
    backward has two parts.
    """
    assert "return x, s.clone()" in text_of(plan_of(MODELS["more later"], *CASES["more later"]))


@pytest.mark.parametrize(("ranks", "given"), [(None, ["FILE"]), ("2", ["FILE"]), ("4", [])])
def test_a_program_that_is_started_otherwise_says_how(
    ranks: str | None, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = load_torch_program(plan_text(Case(dp=2, tp=2)), tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", *given])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit, match="torchrun starts this, with a world size of 4, on a FILE"):
        program.main()


@pytest.mark.parametrize("model", ["llama", "every", "tied"])
def test_the_program_imports_torch_alone(model: str) -> None:
    """Beside Python's own modules, and the library that is written beside it."""
    files = files_of(plan_text(Case(dp=2, tp=2, sp=True, model=model)))
    assert _imports(files["train.py"]) - sys.stdlib_module_names == {"torch", "torch_ops"}
    assert _imports(files["torch_ops.py"]) - sys.stdlib_module_names == {"torch"}


def _imports(text: str) -> set[str]:
    """The modules that a text imports, without their parts."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return {module.partition(".")[0] for module in modules}


def test_all_programs_have_the_same_library_and_import_what_they_use_of_it() -> None:
    plans = [Case(), Case(dp=2, tp=2, sp=True, model="every"), Case(cp=2, how="via ring")]
    libraries: set[str] = set()
    for case in plans:
        files = files_of(plan_text(case))
        libraries.add(files["torch_ops.py"])
        body = files["train.py"].partition("except ModuleNotFoundError")[2]
        (imported,) = re.findall(r"from torch_ops import \(([^)]*)\)", files["train.py"])
        for name in re.findall(r"\w+", imported):
            assert re.search(rf"\b{name}\b", body), name
    assert len(libraries) == 1


def test_a_program_without_its_library_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text_of(plan_text(Case())))
    command = [sys.executable, str(tmp_path / "train.py")]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    said = "error: No module named 'torch_ops': copy torch_ops.py beside this file, or compile the"
    assert (ran.returncode, ran.stderr) == (1, f"{said} plan again\n")


@pytest.mark.parametrize(
    ("how", "window", "hops"),
    [("via ring", 2, 1), ("as zigzag via ring", 2, 3), ("via ring", 1, 0)],
)
def test_keys_go_around_as_often_as_the_plan_says(how: str, window: int, hops: int) -> None:
    text = text_of(
        plan_text(Case(cp=4, how=how)).replace("mask=causal", f"mask=causal, window={window}")
    )
    (said,) = re.findall(r"(?<!def )ring_attention\(([^)]*)\)", text)
    assert re.findall(r"hops=(\d)", said) == [str(hops)] * bool(hops)


REFUSED = {
    "a mesh that loses nodes": plan_text(Case(dp=2))
    .replace("mesh  { ", "cluster { nodes = 2 }\nmesh { ")
    .replace(" dp = 2", " dp = 1..2"),
    "experts that tokens choose": plan_text(Case(model="two")),
    "dropout whose masks are the same on every mesh": plan_text(Case()).replace(
        "mask=causal", "mask=causal, dropout=0.1"
    ),
    "steps that are skipped by their loss": plan_text(Case())
    + "watch { skips = 3  spikes = skip(10) }\n",
    "two chunks of the sequence on each rank over several axes, or of a parameter": plan_text(
        Case(cp=2, how="as zigzag")
    ).replace("wte[vocab, hidden])\n  repeat", "wte[vocab, hidden]) + wpe[seq, hidden]\n  repeat"),
    "a dim over axes in another order than the mesh's": plan_text(Case(uly=2, tp=2, sp=True, kv=4)),
    "parameters of one module that are sharded in several ways": plan_text(
        Case(
            replicas=2,
            dp=2,
            state='zero 3 over replica, dp  group norms { params = ["norm*"]  zero 1 over dp }',
        )
    ),
    "sharded parameters that several stages of one rank share": plan_text(
        Case(
            pp=2,
            dp=2,
            layers=4,
            microbatches=2,
            schedule="zbv",
            model="tied",
            state="zero 1 over dp",
        )
    ),
    "functions that take positions": plan_text(Case())
    .replace(
        "model ",
        'op placed(x[.., s, d], at=s) -> [.., s, d] over .., s from "own_ops:placed"\nmodel ',
        1,
    )
    .replace("wte[vocab, hidden])\n  repeat", "wte[vocab, hidden])\n  x = placed(x)\n  repeat"),
}
"""A plan for each refusal, in their order."""


def test_it_refuses_what_torch_cannot_express(
    golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by one error; its text names the feature and, where torch cannot do it, its version
    and the call.
    """
    monkeypatch.setattr(refusals, "version", lambda _: "2.x")
    monkeypatch.chdir(Path(own_ops.__file__).parent)
    golden(
        "dtensor/refusals.txt",
        "\n\n".join(_told(feature, plan) for feature, plan in REFUSED.items()) + "\n",
    )


def _told(feature: str, plan: str) -> str:
    with pytest.raises(PlanError) as caught:
        text_of(plan)
    text = str(caught.value)
    assert text.count("error[") == 1
    assert re.search(
        f"(torch 2.x alone cannot express|`--target dtensor` does not write) {feature}", text
    )
    return text


def test_it_says_which_settings_of_a_run_have_no_effect(golden: Callable[[str, str], None]) -> None:
    plan = (
        plan_text(Case()).replace("steps = 10", "steps = 10  save_every = 5")
        + "watch { copies every 9  skips = 2 }\n"
    )
    program = lower(for_torch(resolve(Source("tiny.scale", plan))))
    golden(
        "dtensor/without_effect.txt", "\n\n".join(map(str, refusals.without_effect(program))) + "\n"
    )


def test_each_refusal_has_a_plan() -> None:
    assert [each.feature for each in REFUSALS] == [*REFUSED]


def test_calls_of_torch_that_fail() -> None:
    """Those that refusals name; where one succeeds, torch has learnt it."""
    assert run_ranks(2, _failures, functional=True)[0] == {
        "bincount": "Sharding propagation failed",
        "attention": "does not have a sharding strategy",
        "redistribute to Partial": "Can not redistribute",
        "fully_shard twice": "can only be applied to a module once",
        "a mesh of more ranks": "Mesh should not be bigger",
        "dropout": "another mask",
        "fully_shard of two stages": "requires a single root module",
        "Shard": [0, 1, 2, 3],
    }


def _failures() -> dict[str, Any]:
    torch.set_deterministic_debug_mode("default")  # else attention is the one that is written out
    mesh, module = init_device_mesh("cpu", (2,)), nn.Linear(4, 4)
    counts = distribute_tensor(torch.arange(8), mesh, [Shard(0)])
    ones = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    fully_shard(module, mesh=mesh)
    stages = nn.Linear(4, 4), nn.Linear(4, 4)
    stages[1].weight = stages[0].weight
    fully_shard([*stages], mesh=mesh)
    local: Any = counts
    heads = distribute_tensor(torch.ones(2, 2, 4, 4), mesh, [Shard(1)]).requires_grad_()
    return {
        "bincount": _said(lambda: torch.bincount(counts), "Sharding propagation failed"),
        "attention": _said(
            lambda: attention(heads, heads, heads, is_causal=True),
            "does not have a sharding strategy",
        ),
        "redistribute to Partial": _said(
            lambda: ones.redistribute(placements=[Partial()]), "Can not redistribute"
        ),
        "fully_shard twice": _said(
            lambda: fully_shard(module, mesh=mesh), "can only be applied to a module once"
        ),
        "a mesh of more ranks": _said(
            lambda: init_device_mesh("cpu", (3,)), "Mesh should not be bigger"
        ),
        "dropout": "the same mask"
        if torch.equal(_dropped(ones), _dropped(torch.ones(8, 8)))
        else "another mask",
        "fully_shard of two stages": _said(
            lambda: stages[0](torch.ones(4)), "requires a single root module"
        ),
        "Shard": local.to_local().tolist() if torch.distributed.get_rank() == 0 else None,
    }


def _said(call: Callable[[], object], words: str) -> str:
    try:
        call()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return words if words in str(error) else str(error)
    return "it works"


def _dropped(x: Any) -> Tensor:
    torch.manual_seed(0)
    dropped: Any = nn.functional.dropout(x, 0.5)
    return dropped.full_tensor() if hasattr(dropped, "full_tensor") else dropped


def test_nothing_saves_what_backward_recomputes() -> None:
    """A value, and one that is made of it; `checkpoint` would keep both, since other functions
    read them.
    """
    calls, saved = list[str](), set[int]()

    def noted(name: str, x: Tensor) -> Tensor:
        calls.append(name)
        return x.exp()

    def note(x: Tensor) -> Tensor:
        saved.add(x.untyped_storage().data_ptr())
        return x

    x = torch.linspace(0, 1, 4, requires_grad=True)
    with (
        saved_tensors_hooks(note, lambda x: x),
        recompute(noted, "a", x) as a,
        recompute(noted, "b", a) as b,
    ):
        y = (a * b).sum()
    assert {a.data_ptr(), b.data_ptr()}.isdisjoint(saved)
    y.backward()
    assert sorted(calls) == ["a", "a", "b", "b"]
    torch.testing.assert_close(x.grad, (x.exp() * x.exp().exp() * (1 + x.exp())).detach())


REFUSED_PLANS = {
    *("deepseek_v3", "mixtral_8x7b", "qwen3_30b_a3b"),
    *("tiny_elastic", "tiny_five", "tiny_hybrid"),
}
"""Plans with experts, or a mesh that loses nodes."""


@pytest.mark.long
@pytest.mark.parametrize(
    "plan", sorted((ROOT / "plans").glob("*.scale")), ids=lambda path: path.stem
)
def test_a_plan_is_written_or_refused(plan: Path) -> None:
    source = load(plan)
    program = lower(for_torch(resolve(source)))
    if plan.stem in REFUSED_PLANS:
        with pytest.raises(PlanError, match="E0707"):
            emit(program, source)
        return
    text = emit(program, source)["train.py"]
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120
