"""`SCALEC_LOG=trace` and an exception inside a step: both name the plan's line."""

import re

import pytest

from helpers.forked_ranks import HANGS
from helpers.launched import text_files
from scalec.compiler.cli import main
from scalec.testing.faults import Program, fork

PLAN = """\
op half(x[.., d]) -> [.., d] over .., d from "halves:half"

model own(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  ffn = 16  layers = 2 }
  init ~ normal(0.05)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + half(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { tp = 2 }
shard { ffn over tp }
train {
  seq = 8  global_batch = 2  microbatch = 2  steps = 2
  optimizer sgd { lr = 0.1 }
  data text { files = ["text/*.txt"] }
}
"""
HALF = """\
def half(x):
    half.calls += 1
    if half.calls > 2:
        raise ValueError("no more halves")
    return x * 0.5


half.calls = 0
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The standard error of two ranks of a run whose second step calls an op of its own that
    fails.
    """
    folder = tmp_path_factory.mktemp("call_log")
    text_files(folder)
    (folder / "own.scale").write_text(PLAN)
    (folder / "halves.py").write_text(HALF)
    assert main(("compile", str(folder / "own.scale"), "-o", str(folder / "out"), "--no-try")) == 0
    options = f"--device=cpu --data={folder}/text/*.txt"
    program = Program(folder / "out", 2, options, environment={"SCALEC_LOG": "trace"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "out")  # as Python does for a program
        ended = fork(program, folder=folder / "out").wait(HANGS)
    first, second = ended.err
    assert "no more halves" in first + second, ended
    return first, second


def test_each_collective_has_its_place_in_the_plan(said: tuple[str, str]) -> None:
    place = r"all_reduce of `_y\.\d` over tp in forward, layers\.1, microbatch 1, own\.scale:8"
    assert re.search(rf"rank 0, step 1: {place}, 1,024 bytes, \d+\.\d{{3}} ms", said[0])
    steps = re.findall(r"(?m)^rank 0, step (\d): (\w+) ", said[0])
    assert [op for step, op in steps if step == "1"] == [
        "all_reduce"
    ] * 5  # forward and backward of two layers, the norm
    assert "which the plan does not have here" not in "".join(said)


def test_an_error_inside_a_step_ends_with_the_line_of_the_plan(said: tuple[str, str]) -> None:
    failed = next(text for text in said if "no more halves" in text)
    end = r"ValueError: no more halves\nin the plan at own\.scale:8, train\.py:\d+\n    .*half\("
    assert re.search(end, failed), failed
