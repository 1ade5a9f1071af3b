"""Three accounts of a rank with experts: how they are shown, and by which it is said whether a
plan fits.
"""

import json
from pathlib import Path

import pytest

from helpers.programs import make_program
from scalec.compiler import cli
from scalec.compiler.analysis.memory import account, at_loads
from scalec.compiler.ir import Program

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  hidden = 64  experts = 8  expert_ffn = 64  layers = 4 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    y = x
    route y to experts by top(y @ router[hidden -> experts], 2) {
      y = silu(y @ up[hidden -> expert_ffn]) @ down[expert_ffn -> hidden]
    }
    x = x + y
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
cluster { gpu = mine  memory = 1GiB }
mesh { dp = 4 }
shard { experts over dp  batch over dp }
train {
  seq = 256  global_batch = 32  microbatch = 8  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = [python_stdlib] }
}
"""
ROWS = 8 * 256 * 2
"""Of a rank: 2 choices of each of 8 sequences of 256 tokens."""


def needs(program: Program) -> list[int]:
    """Balanced, with room, at worst."""
    return [it.needs for _, (it,) in at_loads(program)]


def test_room_is_what_all_else_goes_by() -> None:
    program = make_program(PLAN)
    balanced, room, worst = needs(program)
    assert balanced < room < worst
    assert account(program).needs == room
    narrow, *_ = needs(make_program(PLAN.replace("steps = 1", "steps = 1  room = 1")))
    assert (
        account(make_program(PLAN.replace("steps = 1", "steps = 1  room = 1"))).needs
        == narrow
        == balanced
    )


def test_a_row_more_is_what_autograd_keeps_of_it() -> None:
    """Of each layer the rows that came, what silu takes and gives, in float32; and what
    exchanges know of each row.
    """
    (_, (equal,)), (_, (more,)), _ = at_loads(make_program(PLAN))
    assert more.activations - equal.activations == 4 * (ROWS // 4) * (3 * 64 * 4 + 2 * 8)


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` and `compile` show the same, and `plan.json` has it in bytes."""
    (tmp_path / "tiny.scale").write_text(PLAN)
    assert (
        cli.main(
            ["compile", str(tmp_path / "tiny.scale"), "--no-verify", "-o", str(tmp_path / "out")]
        )
        == 0
    )
    compile_ = capsys.readouterr().out
    loads = json.loads((tmp_path / "out/plan.json").read_text())["memory"]["loads"]
    assert [(it["load"], it["rows"]["experts"], it["fits"]) for it in loads] == [
        ("balanced", ROWS, True),
        ("room = 1.25", ROWS * 5 // 4, True),
        ("worst", ROWS * 4, True),
    ]
    assert cli.main(["explain", "memory", str(tmp_path / "tiny.scale")]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("") + 3 :][:4]
    assert [line.split()[0] for line in table] == ["rows", "balanced", "room", "worst"]
    assert all(line in compile_ for line in table)
    for line, load in zip(table[1:], loads, strict=True):
        assert f"{load['rows']['experts']:,}" in line
        assert f"{load['bytes'] / 2**20:,.1f} MiB" in line
        assert line.endswith(" fits")


def test_the_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 layers two exchanges each way, of which rows that come back are those of the rank's
    experts.
    """
    (tmp_path / "tiny.scale").write_text(PLAN)
    assert cli.main(["explain", "collectives", str(tmp_path / "tiny.scale")]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("rows of a rank's experts"))
    for line, load in zip(lines[at + 1 : at + 4], (1, 1.25, 4), strict=True):
        row = 64 * 4
        sent = 4 * 2 * (1 + load) * ROWS * row * 3 // 4
        *_, each, unit, total, of = line.split()
        assert f"{ROWS * load:,.0f}" in line
        assert (each, unit) == (f"{ROWS * load * row / 2**20:,.1f}", "MiB")
        assert (total, of) == (f"{sent / 2**20:,.1f}", "MiB")


@pytest.mark.parametrize(("between", "fits"), [(0, False), (1, True)])
def test_a_plan_fits_by_room(
    between: int, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that holds an equal load but not 1.25 of it, and one that holds this but not the
    worst.
    """
    sizes = needs(make_program(PLAN))
    middle = sum(sizes[between : between + 2]) // 2
    (tmp_path / "tiny.scale").write_text(
        PLAN.replace("memory = 1GiB", f"memory = {middle // 1024}KiB")
    )
    assert cli.main(["check", "--must-fit", str(tmp_path / "tiny.scale")]) == (0 if fits else 1)
    err = capsys.readouterr().err
    assert ("W0901" not in err) == fits
    if not fits:
        said = ", ".join(
            f"{name} {size / 2**30:,.1f}" for name, size in zip(NAMES, sizes, strict=True)
        )
        assert f"note: by the rows that a rank's experts get: {said} (GiB)" in err


NAMES = ("balanced", "room = 1.25", "worst")
