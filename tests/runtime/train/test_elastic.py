"""The mesh that an elastic run takes for the ranks that there are, and the lines that start it."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.bigram import PLAN
from scalec.runtime import Account, Plan, Prediction, RunError, SmallerMesh
from scalec.runtime.train.elastic import fit_to_ranks
from scalec.runtime.train.launch import check
from scalec.runtime.train.options import going_on, parse, torchrun
from scalec.runtime.train.run_folder import Claim

SMALLER = (
    SmallerMesh({"dp": 4, "tp": 2}, microbatches=4, nodes=4),
    SmallerMesh({"dp": 2, "tp": 2}, 8, nodes=2),
)
ELASTIC = replace(
    PLAN, mesh={"dp": 8, "tp": 2}, microbatches=2, global_batch=64, nodes=8, smaller=SMALLER
)


def _fitted(
    monkeypatch: pytest.MonkeyPatch, world: int, options: str = "", **environment: str
) -> tuple[Plan, int]:
    monkeypatch.setattr("sys.argv", ["train.py"])
    launched = {
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "WORLD_SIZE": str(world),
    }
    for name, value in (launched | environment).items():
        monkeypatch.setenv(name, value)
    return fit_to_ranks(ELASTIC, parse(ELASTIC, options.split()))


@pytest.mark.parametrize(
    ("world", "dp", "spare"), [(16, 8, 0), (14, 4, 6), (8, 4, 0), (7, 2, 3), (4, 2, 0), (18, 8, 2)]
)
def test_the_largest_mesh_that_the_ranks_make(
    world: int,
    dp: int,
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan, waiting = _fitted(monkeypatch, world)
    assert (plan.mesh, plan.microbatches, waiting) == ({"dp": dp, "tp": 2}, 16 // dp, spare)
    assert os.environ["WORLD_SIZE"] == str(plan.ranks)
    said = capsys.readouterr().err
    assert (
        f"on dp {dp} x tp 2, {16 // dp} microbatches a step, in place of dp 8 x tp 2\n" in said
    ) == (dp < 8)
    assert ("stand by" in said) == (spare > 0)
    assert replace(plan, mesh=PLAN.mesh, microbatches=1, nodes=1, largest=None) == replace(
        ELASTIC, mesh=PLAN.mesh, microbatches=1, nodes=1
    )


def test_too_few_ranks_are_told_how_many_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spare = _fitted(monkeypatch, 3)
    assert (plan, spare) == (ELASTIC, 0)
    with pytest.raises(
        RunError, match="takes 16 ranks, or at least 4, not 3; start it with: TORCH_DISABLE"
    ):
        check(plan, parse(plan, []))


@pytest.mark.parametrize(
    ("options", "store", "message"),
    [
        ("", "False", "would begin anew: start it with --resume auto"),
        ("--resume auto", "True", "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"),
    ],
)
def test_a_restart_that_could_not_go_on(
    options: str, store: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": store}
    with pytest.raises(RunError, match=message):
        _fitted(monkeypatch, 16, options, **given)


@pytest.mark.parametrize(
    ("restarts", "options", "store", "message"),
    [
        ("0", "", "True", ""),
        ("2", "", "False", "would begin anew"),
        ("2", "--resume auto", "True", "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"),
        ("2", "--resume auto", "False", ""),
    ],
)
def test_restarts_of_a_plan_for_one_size(
    restarts: str, options: str, store: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": store,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=message) if message else nullcontext():
        assert fit_to_ranks(PLAN, parse(PLAN, options.split())) == (PLAN, 0)


def test_the_lines_that_start_it_are_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it runs; those of a plan for one node are as ever."""
    monkeypatch.setattr("sys.argv", ["train.py", "--resume", "auto", "--lr", "0.1"])
    line = (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2:8 --max-restarts=10"
        " --nproc-per-node=2"
        " --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py"
    )
    for plan in (ELASTIC, ELASTIC.shrink_to(8), ELASTIC.shrink_to(5)):
        assert torchrun(plan) == f"{line} --resume auto"
        assert going_on(plan, 9) == f"{line} --resume auto --steps 9 --lr 0.1"
    alone = replace(PLAN, smaller=(SmallerMesh({"dp": 1}, 2),))
    further = "torchrun --standalone --nproc-per-node=2 train.py --resume auto --steps 9 --lr 0.1"
    assert going_on(alone.shrink_to(1), 9) == further


def test_the_last_start_has_the_folder(tmp_path: Path) -> None:
    first = Claim(tmp_path)
    first.check(now=True)
    second = Claim(tmp_path)
    second.check(now=True)
    with pytest.raises(RunError, match=f"another start of this run has taken over {tmp_path}"):
        first.check(now=True)
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]
    (tmp_path / "claim").unlink()  # as where the folder is gone: no later start has it
    second.check(now=True)


def test_each_mesh_has_its_own_prediction() -> None:
    """Programs of scalec 0.2 have an account in the plan and in each smaller mesh."""
    accounts = {8: Account("cpu", (1,)), 4: Account("cpu", (2,)), 2: Account("cpu", (4,))}
    predictions = tuple(
        Prediction({"dp": dp, "tp": 2}, account) for dp, account in accounts.items()
    )
    older = tuple(replace(mesh, account=accounts[mesh.mesh["dp"]]) for mesh in SMALLER)
    for plan in (
        replace(ELASTIC, predictions=predictions),
        replace(ELASTIC, account=accounts[8], smaller=older),
    ):
        for dp, account in accounts.items():
            assert plan.shrink_to(2 * dp).prediction.account == account
    assert ELASTIC.prediction.account is None
