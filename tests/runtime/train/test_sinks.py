"""`--log-to tensorboard | wandb`: the numbers of log.jsonl, read back from there; a place that
fails costs no run.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.small_log import small_log
from scalec.runtime.config.plan import Metrics
from scalec.runtime.errors import RunError
from scalec.runtime.train.sinks import SINKS, Sinks, check_sinks


def _train(folder: Path, sinks: Sinks, steps: int = 3) -> list[dict[str, Any]]:
    """Logs some steps with another loss each; returns the records of log.jsonl."""
    log = small_log(folder, sinks=sinks)
    for step in range(1, steps + 1):
        log.step(
            step,
            Metrics(loss=torch.tensor(4.0 / step), tokens=torch.tensor(4), norm=torch.tensor(1.0)),
            0.1,
        )
    log.validation(steps, Metrics(loss=torch.tensor(5.0), tokens=torch.tensor(4)))
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {
        tag: [(it.step, it.value) for it in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def test_tensorboard_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    records = _train(tmp_path, Sinks(["tensorboard"], tmp_path, 0))
    written = {
        name: [
            (record["step"], pytest.approx(record[name])) for record in records if name in record
        ]
        for name in dict.fromkeys(name for record in records for name in record if name != "step")
    }
    assert _events(tmp_path) == written
    assert {"loss", "norm", "lr", "validation", "tokens_per_s_process"} <= {*written}


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    Sinks(["tensorboard"], tmp_path, 0).write({"step": 1, "loss": 9.0})
    first = Sinks(["tensorboard"], tmp_path, 0)
    first.write({"step": 2, "loss": 8.0})
    first.write({"step": 3, "loss": 7.0})
    Sinks(["tensorboard"], tmp_path, 1).write({"step": 2, "loss": 6.0})
    assert _events(tmp_path)["loss"][-1] == (2, 6.0)
    assert [step for step, _ in _events(tmp_path)["loss"]].count(3) == 0


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package, which needs an account; its calls."""
    calls: list[Any] = []
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)

    def init(**given: Any) -> SimpleNamespace:
        calls.append(given)
        return SimpleNamespace(log=lambda numbers, step: calls.append((step, numbers)))

    vars(module)["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb(tmp_path: Path, wandb: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    records = _train(tmp_path, Sinks(["wandb"], tmp_path, 0), steps=1)
    begun, *logged = wandb
    assert (begun["project"], begun["name"]) == ("scalec", tmp_path.name)
    assert logged == [(it["step"], {key: it[key] for key in it if key != "step"}) for it in records]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    Sinks(["wandb"], tmp_path, 0).write({"step": 1})
    assert wandb[-2]["project"] is None


def test_a_place_that_fails_costs_its_numbers_alone(
    tmp_path: Path,
    wandb: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(**_: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    records = _train(tmp_path, Sinks(["wandb", "tensorboard"], tmp_path, 0))
    said = capsys.readouterr().out
    assert said.count("warning: --log-to wandb gets no more numbers: OSError: no network") == 1
    assert len(records) == 4
    assert [step for step, _ in _events(tmp_path)["loss"]] == [2, 3]


def test_what_is_not_installed_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["scalec.runtime.train.sinks"], "find_spec", lambda _: None)
    with pytest.raises(
        RunError, match=r"--log-to wandb needs the package wandb: pip install 'scalec\[wandb\]'"
    ):
        check_sinks(["wandb"])
    check_sinks([])


def test_each_place_is_an_extra() -> None:
    import tomllib

    project = tomllib.loads(
        (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    assert SINKS.keys() <= project["optional-dependencies"].keys()
