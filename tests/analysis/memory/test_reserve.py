"""The memory and the time of a plan's looks, beside what the runtime keeps, and in both reports."""

from pathlib import Path

import pytest

from helpers.oracle.plans import Case, plan_text
from helpers.programs import load_program
from scalec.compiler.analysis.memory import account, reserve
from scalec.compiler.cli import main
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh
from scalec.runtime.debug import twice

PLANS = Path(__file__).parents[3] / "plans"
CASES = [
    Case(optimizer="adamw", precision="bf16"),
    Case(optimizer="momentum", precision="fp32"),
    Case(precision="fp16"),
    Case(optimizer="adamw", precision="fp64"),
]
WATCH = " watch { replay every 2 }"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_keeps_what_is_counted(case: Case, tmp_path: Path) -> None:
    text = plan_text(case)
    program = compile_plan(Source("tiny.scale", text + WATCH))
    module = load_program(text, tmp_path)
    _, state = module.build(Mesh(module.PLAN.mesh))
    pieces = [piece for part in state._parts for piece in part.pieces(twice._PIECE)]
    kept = max(sum(each.nbytes for each in piece.tensors().values()) for piece in pieces)
    assert reserve.looks_in_update(program) - reserve.PRODUCTS == pytest.approx(kept, rel=0.01)
    assert reserve.PIECE == twice._PIECE


def test_pieces_are_all_of_a_part(tmp_path: Path) -> None:
    case = Case(optimizer="adamw", precision="bf16")
    module = load_program(plan_text(case), tmp_path)
    _, state = module.build(Mesh(module.PLAN.mesh))
    for part in state._parts:
        pieces = [*part.pieces(100)]
        for name, whole in part.tensors().items():
            assert sum(piece.tensors()[name].numel() for piece in pieces) == whole.numel()
        assert all(piece.parameters.numel() <= max(100, len(part.parameters)) for piece in pieces)


def test_the_update_is_the_peak_where_little_is_kept_for_backward() -> None:
    plain, watched = (
        account(compile_plan(Source("tiny.scale", plan_text(CASES[0]) + more)))
        for more in ("", WATCH)
    )
    assert watched.peak.where == "update"
    assert watched.state == plain.state
    assert watched.total >= plain.always + reserve.KEYS + reserve.PRODUCTS
    assert watched.tables == plain.tables + reserve.KEYS


def test_both_reports_tell_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "mine.scale"
    use = f'use "{PLANS / "llama3_8b.scale"}"'
    plan.write_text(
        f"{use} watch {{ copies every 100  replay every 1000  skips = 1  spikes = skip(10) }}"
    )
    assert main(["explain", "time", "--no-advice", str(plan)]) == 0
    said = capsys.readouterr().out
    for words in (
        "\nwatch, besides ",
        "\ncopies every 100 ",
        "\nreplay every 1000 ",
        "\nspikes = skip(10.0) ",
    ):
        assert words in said
    assert main(["explain", "memory", str(plan)]) == 0
    assert "\nwatch: 292.0 MiB during the update, for hashes, whose keys" in capsys.readouterr().out
    plan.write_text(use)
    main(["explain", "time", "--no-advice", str(plan)])
    main(["explain", "memory", str(plan)])
    assert "watch" not in capsys.readouterr().out
