"""`scalec convert`: the command line, and what it says where names or files are wrong."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.programs import load_program
from scalec.compiler.cli import main
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import saver

PLAN = """
model bigram(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 8 }
  init ~ normal(0.02)
  loss = cross_entropy(embedding(tokens, wte[vocab, hidden]) @ head[hidden -> vocab], labels)
}
train {
  seq = 8  global_batch = 4  microbatch = 2  steps = 5
  optimizer adamw { lr = 1e-2 }
  data text { files = [python_stdlib] }
}
"""
NAMES = 'names hf { wte = "model.embed_tokens.weight"  head = "model.out.weight" }\n'
SHARDED = (
    "mesh { dp = 2  tp = 2 }  shard { batch over dp  vocab over tp }  state { zero 3 over dp }"
)


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> None:
    """Two plans, of which one has names."""
    Path("plain.scale").write_text(PLAN)
    Path("named.scale").write_text(PLAN + NAMES)


def test_the_newest_checkpoint_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """With a table of one's own, which names one tensor otherwise."""
    module = load_program(PLAN + NAMES, Path("program"))
    _, state = module.build(Mesh(module.PLAN.mesh))
    for step in (1, 2):
        saver.save(Path("runs", "tiny", "checkpoints"), step, state)
    tensors = {"model.embed_tokens.weight": "tokens.weight", "model.out.weight": "out.weight"}
    Path("mine.json").write_text(json.dumps({"tensors": tensors}))
    assert main(["convert", "named.scale", "runs/tiny", "-o", "made", "--names", "mine.json"]) == 0
    assert capfd.readouterr().out == "wrote runs/tiny/checkpoints/step-000002 to made: 9 tensors\n"
    assert {"tokens.weight", "optimizer.state.out.weight.exp_avg"} < load_file(
        Path("made", "model.safetensors")
    ).keys()
    assert main(["convert", "named.scale", "runs/none", "-o", "step-000003"]) == 2
    assert capfd.readouterr().err == "error: there is no `runs/none`\n"


@pytest.mark.parametrize(
    ("plan", "names", "line"),
    [
        (
            "plain",
            "hf",
            "other names need the plan's `names hf`, which says where Hugging Face's files"
            " hold each ",
        ),
        (
            "named",
            "mine",
            "cannot read `mine`: --names takes scalec, hf, torchtitan, or a table in a file",
        ),
        ("named", "named.scale", "`named.scale` is no table of names: docs/how_to.md shows one"),
        (
            "named",
            "torchtitan",
            "`model.out.weight` has no name in torchtitan: give a table of your own, --names ",
        ),
    ],
)
def test_wrong_names_are_a_line(
    plan: str, names: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", f"{plan}.scale", "run", "-o", "made", "--names", names]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_two_plans_say_who_writes_and_who_reads(capsys: pytest.CaptureFixture[str]) -> None:
    few, wide = (
        PLAN + "mesh { dp = 2 }  shard { batch over dp }",
        PLAN.replace("vocab = 256", "vocab = 250"),
    )
    for name, text in (("few", few), ("many", PLAN + SHARDED), ("wide", wide)):
        Path(f"{name}.scale").write_text(text)
    assert main(["convert", "many.scale", "few.scale"]) == 0
    assert capsys.readouterr().out == (
        "2 tensors, 4,096 elements, each with 2 values of optimizer state\n"
        "written  each element once, by one rank: 4 parts by 4 ranks, 25% by rank 0\n"
        "read     each element by every rank that keeps it, in 2 parts\n"
    )
    assert main(["convert", "few.scale", "wide.scale"]) == 0
    assert capsys.readouterr().out.startswith(
        "no checkpoint goes from one to the other: `wte` is [256, 8] in one, [250, 8] in the"
        " other; convert it with"
    )
    assert main(["convert", "few.scale", "runs"]) == 2
    assert capsys.readouterr().err == "error: convert needs a name for its result: -o TARGET\n"
