"""IR text with any word of it edited: a diagnostic or a program, never a traceback."""

import random
import re
from pathlib import Path

import pytest

from scalec.compiler import cli

pytestmark = pytest.mark.usefixtures("working_folder")


PLAN = """use "scalec:models/llama.scale" {
  dims { vocab = 16  hidden = 8  heads = 4  kv_heads = 2  ffn = 12  layers = 2 }
}
MESH
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd { lr = 0.1  clip = 1.0 }
  data text { files = ["a"] }
}
"""
TENSORS = "mesh { dp = 2  tp = 2 }\nshard { batch over dp  vocab, heads, kv_heads, ffn over tp }"
MESHES = {
    "tensors": TENSORS,
    "zero": f"{TENSORS}\nstate {{ zero 3 over dp }}",
    "stages": "mesh { pp = 2  dp = 2 }\nshard { batch over dp  layers over pp }",
}
COMMANDS = [("check",), ("compile", "-o", "out"), ("explain", "memory"), ("verify",), ("schedule",)]
WORD = re.compile(r'[A-Za-z_][\w.]*|\d+(?:\.\d+)?(?:e[+-]?\d+)?|"[^"]*"')
ANYTHING = re.compile(rf"{WORD.pattern}|[^\w\s]")
NUMBERS = ["0", "1", "3", "17", "1.5", "99999999999999"]


def kind(word: str) -> str:
    return "number" if word[0].isdigit() else "string" if word[0] == '"' else "name"


def replaced(text: str, rng: random.Random) -> str:
    """With another word of its kind in the place of one."""
    words = list(WORD.finditer(text, text.index("program ")))
    at = rng.choice(words)
    others = [each[0] for each in words if kind(each[0]) == kind(at[0])]
    other = rng.choice(NUMBERS if kind(at[0]) == "number" and rng.random() < 0.5 else others)
    return text[: at.start()] + other + text[at.end() :]


def without(text: str, rng: random.Random) -> str:
    """Without a word or a sign."""
    at = rng.choice(list(ANYTHING.finditer(text)))
    return text[: at.start()] + text[at.end() :]


def moved(text: str, rng: random.Random) -> str:
    """With a line elsewhere."""
    lines = text.split("\n")
    lines.insert(rng.randrange(len(lines)), lines.pop(rng.randrange(len(lines))))
    return "\n".join(lines)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", ["resolve", "insert_collectives", "schedule_pipeline"])
@pytest.mark.parametrize("mesh", MESHES)
def test_edited_ir_ends_in_a_diagnostic(
    mesh: str, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiny.scale").write_text(PLAN.replace("MESH", MESHES[mesh]))
    assert cli.main(["ir", "tiny.scale", "--after", stage]) == 0
    text = capsys.readouterr().out
    for seed in range(40):
        rng = random.Random(f"{mesh} {stage} {seed}")
        edit = rng.choices([replaced, without, moved], [6, 1, 1])[0]
        Path("edited.ir").write_text(edit(text, rng))
        status = cli.main([*rng.choice(COMMANDS), "edited.ir"])
        err = capsys.readouterr().err
        assert status in (0, 1, 2), f"{seed}: {err}"
        assert "Traceback" not in err


def test_what_the_checks_of_ir_do_not_find(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("tuple index out of range")

    Path("tiny.scale").write_text(PLAN.replace("MESH", ""))
    cli.main(["ir", "tiny.scale", "--after", "resolve"])
    Path("edited.ir").write_text(capsys.readouterr().out)
    monkeypatch.setattr("scalec.compiler.proof.verify", fail)
    assert cli.main(["verify", "edited.ir"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error[E0706]: this IR text makes no program\n --> edited.ir\n")
    assert "note: module `cli.compile`: IndexError: tuple index out of range\n" in said
    assert cli.main(["verify", "tiny.scale"]) == 70  # of a plan it is a bug


@pytest.mark.parametrize(
    ("stated", "edited"),
    [
        ("shard_axes [dp]", "shard_axes [tp]"),
        ("shard_axes [dp] ", ""),
        ("reduce_axes [tp]", "reduce_axes [dp, tp]"),
        (" reduce_axes [tp]", ""),
        (" reshard_after_forward", ""),
        (" shard_gradients", ""),
    ],
)
def test_a_bucket_is_moved_as_it_says(
    stated: str, edited: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiny.scale").write_text(
        PLAN.replace("MESH", MESHES["zero"].replace("over tp", "over tp  seq over tp"))
    )
    cli.main(["ir", "tiny.scale"])
    text = capsys.readouterr().out
    assert stated in text
    Path("edited.ir").write_text(text.replace(stated, edited, 1))
    assert cli.main(["check", "edited.ir"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error[E0190]: this IR is not legal\n --> edited.ir\n")
    assert (
        "note: schedule_pipeline: bucket layers.vectors is moved as one with shard_axes ['dp']"
        in said
    )
