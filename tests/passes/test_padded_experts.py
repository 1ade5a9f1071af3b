"""Padded rows of experts: how many there are, where they are sent and gathered, and which plans
have none.

Sizes are written by hand: of 16 positions with 2 of 8 experts a capacity of 1.25 leaves each expert
⌈1.25 · 4⌉ = 5.
"""

from pathlib import Path

import pytest

from helpers.programs import get_refusal
from scalec.compiler import cli
from scalec.compiler.analysis.communication import collectives
from scalec.compiler.ir import Program, walk
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

PLAN = """\
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  experts = 8  expert_ffn = 16  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    y = rmsnorm(x, norm[hidden], 1e-5)
    route y to experts by top(y @ router[hidden -> experts], 2, capacity=1.25) {
      y = silu(y @ e_up[hidden -> expert_ffn]) @ e_down[expert_ffn -> hidden]
    }
    x = x + y
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { dp = 2  cp = 2  tp = 2 }
shard { RULES }
train {
  seq = 16  global_batch = 16  microbatch = 2  steps = 30  experts = padded
  optimizer adamw { lr = 1e-3 }
  data text { files = [python_stdlib] }
}
"""
Shape = tuple[int, ...]


def _compiled(rules: str, capacity: str = "1.25") -> Program:
    return compile_plan(
        Source("plan.scale", PLAN.replace("RULES", rules).replace("1.25", capacity))
    )


def _shapes(program: Program, kind: str) -> list[Shape]:
    """Of the results of a kind of forward's ops on one rank."""
    ops = [op for op in walk(program.forward.body) if op.kind == kind]
    return [program.local_shape(op.outputs[0].type) for op in ops]


def _sent(program: Program, *ops: str) -> list[tuple[str, tuple[str, ...], Shape]]:
    """What forward sends of rows: the collective, its axes, the shape that goes in."""
    rows = [
        it for it in collectives(program) if it.where == "forward" and it.line == "plan.scale:8"
    ]
    rows += [
        it for it in collectives(program) if it.where == "forward" and it.line == "plan.scale:7"
    ]
    return [
        (it.op, it.axes, it.shape)
        for it in rows
        if it.op in ops and it.dtype == "f32" and 32 in it.shape
    ]


SHARES = "batch over dp  seq over cp, tp"


@pytest.mark.parametrize(
    ("rules", "capacity", "dispatched", "multiplied"),
    [
        # no rank has more rows for an expert than positions of its part of the sequence
        (f"experts over dp  {SHARES}", "1.25", (8, 2 * 4, 32), (4, 2 * 2 * 4, 16)),
        (f"experts over dp  {SHARES}", "0.5", (8, 2 * 2, 32), (4, 2 * 2 * 2, 16)),
        (f"experts over dp, cp, tp  {SHARES}", "1.25", (8, 2 * 4, 32), (1, 8 * 2 * 4, 16)),
        # all of the sequence
        ("experts over dp  batch over dp, cp, tp", "1.25", (8, 2 * 5, 32), (4, 2 * 2 * 5, 16)),
        ("experts over dp  batch over dp, cp, tp", "9", (8, 2 * 16, 32), (4, 2 * 2 * 16, 16)),
        ("experts over cp, tp  batch over dp", "1.25", (2, 2 * 5, 32), (2, 2 * 5, 16)),
        # parts of experts
        (
            f"experts over dp  expert_ffn over tp  {SHARES}",
            "1.25",
            (8, 2 * 4, 32),
            (4, 2 * 2 * 2 * 4, 8),
        ),
        (
            f"experts over dp  expert_ffn over cp, tp  {SHARES}",
            "1.25",
            (8, 2 * 4, 32),
            (4, 2 * 4 * 2 * 4, 4),
        ),
        ("expert_ffn over tp  batch over dp, cp, tp", "1.25", (8, 2 * 5, 32), (8, 2 * 2 * 5, 8)),
        (
            "experts over cp  expert_ffn over tp  batch over dp, cp",
            "1.25",
            (8, 2 * 5, 32),
            (4, 2 * 2 * 5, 8),
        ),
    ],
)
def test_rows_of_each_expert(
    rules: str, capacity: str, dispatched: Shape, multiplied: Shape
) -> None:
    program = _compiled(rules, capacity)
    assert {*_shapes(program, "dispatch")} == {dispatched}
    assert {*_shapes(program, "silu")} == {multiplied}
    assert not [
        op for op in program.ops if op.kind in ("exchange", "exchange_back", "exchange_counts")
    ]
    assert not [it for it in collectives(program) if it.ragged]
    verify(
        program,
        compile_plan(
            Source("plan.scale", PLAN.replace("RULES", rules).replace("1.25", capacity)), "resolve"
        ),
    )


def test_rows_are_exchanged_before_they_are_gathered_and_scattered_before_they_come_back() -> None:
    program = _compiled(f"experts over dp  expert_ffn over tp  {SHARES}")
    assert _sent(program, "all_to_all", "all_gather", "reduce_scatter") == [
        ("all_to_all", ("dp",), (2, 4, 8, 32)),
        ("all_gather", ("tp",), (16, 4, 32)),
        ("reduce_scatter", ("tp",), (32, 4, 32)),
        ("all_to_all", ("dp",), (2, 4, 8, 32)),
    ]


@pytest.mark.parametrize(
    ("rules", "axes"),
    [
        (
            "experts over dp  expert_ffn over tp  batch over dp  seq over cp  seq over tp as"
            " zigzag",
            "tp",
        ),
        ("expert_ffn over dp, tp  batch over dp  seq over tp  vocab over cp", "tp"),
    ],
)
def test_rows_that_would_not_come_apart_as_they_came_together(rules: str, axes: str) -> None:
    """Two chunks a rank, and several dims of tokens that one dim of memory has."""
    error = str(get_refusal(PLAN.replace("RULES", rules)))
    assert f"error[E0612]: rows of experts cannot be gathered over `{axes}`" in error
    assert "padded" not in error


def test_rows_without_a_bound(tmp_path: Path) -> None:
    rules = f"experts over dp  expert_ffn over tp  {SHARES}"
    text = PLAN.replace("RULES", rules)
    assert "error[E0417]: padded experts need a `capacity`" in str(
        get_refusal(text.replace(", capacity=1.25", ""))
    )
    error = str(get_refusal(text.replace("  experts = padded", "")))
    assert "error[E0612]: rows of experts cannot be gathered over `tp`" in error
    assert "; or write `experts = padded` in `train`" in error
    error = str(get_refusal(text.replace("experts = padded", "experts = padded  compile = on")))
    assert "error[E0412]: which tokens an expert gets is not known to a compiled layer" in error


def test_what_padding_has_no_effect_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, _, rest = PLAN.partition("    route")
    text = (
        start + "    y = silu(y)" + rest.partition("    }")[2].replace("experts over", "batch over")
    )
    for old, new, warned in (
        (text, "batch over dp, cp, tp", "`experts` has no effect"),
        (
            PLAN.replace("experts = padded", "experts = padded  room = 2"),
            SHARES,
            "`room` has no effect",
        ),
    ):
        (tmp_path / "m.scale").write_text(old.replace("RULES", new))
        assert cli.main(["check", str(tmp_path / "m.scale")]) == 0
        assert f"warning[W0912]: {warned}" in capsys.readouterr().err


def test_padded_and_dropless_experts_make_the_same_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAN.replace("RULES", f"experts over dp  {SHARES}")
    for name, each in {"a": text, "b": text.replace("  experts = padded", "")}.items():
        (tmp_path / f"{name}.scale").write_text(each)
    assert cli.main(["verify", str(tmp_path / "a.scale"), str(tmp_path / "b.scale")]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [(" padded 16 ", " padded 12 "), (" padded 16 ", " "), ("<capacity=1.25", "<capacity=0.5")],
)
def test_ir_of_other_sizes_is_refused(old: str, new: str) -> None:
    source = Source("plan.scale", PLAN.replace("RULES", f"experts over dp  {SHARES}"))
    text = print_ir(compile_plan(source, "insert_collectives"))
    assert print_ir(read_ir(Source("plan.ir", text))) == text
    with pytest.raises(AssertionError, match="experts are not padded to their capacity"):
        lower(read_ir(Source("plan.ir", text.replace(old, new))))
