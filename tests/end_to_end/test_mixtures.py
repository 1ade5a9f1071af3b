"""Programs whose data is a mixture: resumption in the middle, other weights, and files that
change under a run.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from helpers.bigram import PLAN, build, eval_step, train_step
from helpers.launched import run_file, run_recorded
from helpers.programs import write_program
from scalec.runtime import Batch, Metrics, Text, TrainState
from scalec.runtime.checkpoint.reader import Saved

SAMPLE = """
model bigram(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 8 }
  init ~ normal(0.02)
  loss = cross_entropy(embedding(tokens, wte[vocab, hidden]) @ head[hidden -> vocab], labels)
}
train {
  seq = 8  global_batch = 4  microbatch = 2  steps = 5
  optimizer adamw { lr = 1e-2 }
  data text {
    set low { files = ["low/*.txt"]  weight = 3  holdout = 20% }
    set high { files = ["high/*.txt"] }
  }
}
mesh { dp = 2 }
shard { batch over dp }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program and its data: 18 and 8 sequences, of which one file of `low` is held out."""
    for name, files, start in (("low", 3, 0), ("high", 2, 128)):
        (tmp_path / name).mkdir()
        for number in range(files):
            (tmp_path / f"{name}/{number}.txt").write_bytes(
                bytes(start + i * (number + 3) % 97 for i in range(81))
            )
    write_program(SAMPLE, tmp_path, "mixed.scale")
    return tmp_path


def _weights(folder: Path, run: str, step: int) -> list[Tensor]:
    return [*Saved(folder / f"{run}/checkpoints/step-{step:06d}").whole(["wte", "head"]).values()]


def test_a_mixture_is_resumed_in_the_middle_and_only_under_its_own_weights(folder: Path) -> None:
    assert run_file(folder, 2, "--device=cpu --out whole") == [(0, "")] * 2
    assert run_file(folder, 2, "--device=cpu --out parts --steps 3") == [(0, "")] * 2
    assert run_file(folder, 2, "--device=cpu --out parts --resume") == [(0, "")] * 2
    assert all(map(Tensor.equal, _weights(folder, "whole", 5), _weights(folder, "parts", 5)))

    group = 'betas = [0.8, 0.95]  clip = 1.0  group head { params = ["head"]  lr_scale = 0.5 }'
    write_program(
        SAMPLE.replace("weight = 3", "weight = 2").replace("lr = 1e-2", f"lr = 1e-2  {group}"),
        folder,
        "mixed.scale",
    )
    (status, errors), _ = run_file(folder, 2, "--device=cpu --out parts --resume --steps 9")
    assert status == 2
    changed = "weights was low 3 high 1, now low 2 high 1: samples are of other sets"
    assert f"  {changed}, so some are skipped and others seen twice\n" in errors
    assert (
        "  betas was [0.9, 0.95], now [0.8, 0.95]: the averages that were saved decay otherwise\n"
        "  clip was 0.0, now 1.0: gradients are clipped otherwise\n"
        "  groups was none, now head (head) with weight_decay None, lr_scale 0.5: parameters"
        " have another decay or"
        " learning rate\n"
    ) in errors
    assert (
        run_file(folder, 2, "--device=cpu --out parts --resume-anyway --steps 9") == [(0, "")] * 2
    )
    out = (folder / "out0").read_text()
    assert f"{changed}, so some" in out
    assert "low is seen 1.3 times in 9 steps\n" in out
    assert json.loads((folder / "parts/checkpoints/step-000009/index.json").read_text())["run"][
        "weights"
    ] == ("low 2 high 1")


@pytest.mark.parametrize("size", [1, 400])
def test_a_file_that_is_cut_short_or_grows_under_a_run_ends_it_with_its_name(
    tmp_path: Path, size: int
) -> None:
    """Where it was mapped, SIGBUS ended it."""
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)))
    steps = list[int]()

    def third_changes_it(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
        steps.append(len(steps))
        if len(steps) == 3:
            os.truncate(path, size)
        return train_step(model, state, batch, lr)

    plan = replace(PLAN, mesh={"dp": 1}, data=Text((str(path),), holdout=0.0), steps=50)
    ((status, errors),) = run_recorded(
        tmp_path, plan, build, third_changes_it, eval_step, record=""
    )
    assert status == 1
    assert errors == (
        f"error: {path} is not as it was when the run began (200 bytes then, {size} now): a"
        " run's data must not change;"
        " restore the file, then --resume\n"
    )
