"""`bucket = auto`: the size of least seconds with which a plan fits, against all sizes tried
one by one.
"""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from attrs import evolve

from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.programs import import_module, write_program
from helpers.timed_plans import WASTEFUL
from scalec.compiler import cli
from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.memory import account, fits
from scalec.compiler.analysis.time.report import report
from scalec.compiler.config.settings import Size
from scalec.compiler.ir import Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.reports.summary import largest_bucket
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower

PLANS = Path(__file__).parents[2] / "plans"
WORDS = ["", *(f"bucket = {2**power}MiB" for power in range(2, 17))]
SMALL = """use "gpt2_124m.scale" {
  dims { vocab = 1024  hidden = 256  heads = 4  layers = 8 }
  train { global_batch = 512  microbatch = 32 }
}
cluster { gpu = l4  nodes = 16  gpus_per_node = 1 }
mesh { dp = 16  tp = 1 }
"""
LARGE = 'use "llama3_8b.scale" { train { seq = 2048  global_batch = 128  microbatch = 1 } }\n'
STAGED = "shard { batch over dp  vocab, heads, kv_heads, ffn over tp  layers over pp }\n"
TEXTS = {
    "whole gradients": SMALL + "state { zero 0 over dp  WORD }",
    "shared optimizer": LARGE + "mesh { dp = 128  tp = 1 }\nstate { zero 1 over dp  WORD }",
    "shared gradients, none fits": LARGE
    + "mesh { dp = 128  tp = 1 }\ncluster { memory = 20GiB }\nstate { zero 2 over dp  WORD }",
    "shared parameters": LARGE
    + "mesh { dp = 128  tp = 1 }\nstate { zero 3 over dp  prefetch = 2  WORD }",
    "stages": LARGE + STAGED + "mesh { pp = 4  dp = 32  tp = 1 }\nstate { zero 1 over dp  WORD }",
    "little memory": (
        f'use "llama3_70b.scale" {{ {WASTEFUL} }}\ncluster {{ memory = 56GiB }}\nstate {{ WORD }}'
    ),
}


def _compiled(text: str, word: str = "bucket = auto", until: str = PASS_NAMES[-1]) -> Program:
    return compile_plan(Source(str(PLANS / "buckets.scale"), text.replace("WORD", word)), until)


def _seconds(program: Program) -> float:
    on = hardware(program)
    assert on
    return report(program, on, by_load=False).step.seconds


def _fits(program: Program) -> bool:
    return bool(fits(program, account(program)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TEXTS)
def test_no_size_that_fits_is_faster_and_no_smaller_one_as_fast(name: str) -> None:
    every = {
        program.flow.largest or inf: program
        for program in (_compiled(TEXTS[name], word) for word in WORDS)
    }
    able = [it for it in every.items() if _fits(it[1])] or [*every.items()]
    seconds = {size: _seconds(program) for size, program in able}
    found = _compiled(TEXTS[name])
    assert (found.flow.largest or inf) == min(seconds, key=lambda size: (seconds[size], size))
    assert found == every[found.flow.largest or inf]


def test_a_size_is_chosen_for_its_time_and_for_its_memory() -> None:
    """A small model has one bucket for all if none is set, a large one large ones."""
    faster, fitting = (_compiled(TEXTS[name]) for name in ("whole gradients", "little memory"))
    assert _seconds(faster) < _seconds(_compiled(TEXTS["whole gradients"], ""))
    assert _fits(fitting)
    assert not _fits(_compiled(TEXTS["little memory"], ""))


def test_rows_keep_to_their_bytes() -> None:
    """Of `schedule = auto`, although a rank has memory for buckets with which it is faster."""
    placed, small = (
        _compiled(TEXTS["stages"], until="place_stages"),
        _compiled(TEXTS["stages"], "bucket = 4MiB"),
    )
    assert placed.pipeline
    most, settings = Size(account(small).total), placed.pipeline.settings
    settings = evolve(settings, schedule=evolve(settings.schedule, memory=most))
    bounded = evolve(placed, pipeline=evolve(placed.pipeline, settings=settings))
    assert account(_compiled(TEXTS["stages"])).total > most.bytes
    assert account(lower(bounded)).total == most.bytes


def test_the_choice_is_in_the_ir() -> None:
    """Which says `auto` before the pass; text of either reads back to the same."""
    before, found = (
        _compiled(TEXTS["whole gradients"], until=until)
        for until in ("place_stages", PASS_NAMES[-1])
    )
    assert "  bucket = auto\n" in print_ir(before)
    assert "  bucket = 4MiB\n" in print_ir(found)
    assert all(read_ir(Source("buckets.ir", print_ir(it))) == it for it in (before, found))


def test_a_gpu_of_unknown_speed_leaves_it_unset() -> None:
    text = TEXTS["whole gradients"].replace("gpu = l4", 'gpu = "mine"  memory = 80GiB')
    found, model = _compiled(text), _compiled(text, until="resolve")
    assert found == _compiled(text, "")
    assert (
        largest_bucket(found, model)
        == "largest bucket: unset, as the speed of the cluster's GPU is not known"
    )


def test_reports_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "largest bucket: 4.0 MiB, by the seconds of a step on l4\n"
    plan = tmp_path / "plan.scale"
    plan.write_text(
        TEXTS["whole gradients"]
        .replace("WORD", "bucket = auto")
        .replace("gpt2", str(PLANS / "gpt2"))
    )
    cli.main(["explain", "collectives", str(plan)])
    assert told in capsys.readouterr().out
    cli.main(["compile", "--no-verify", str(plan), "-o", str(tmp_path / "out")])
    assert told in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / "plan.json").read_text())["settings"]
    assert settings["state"] == {"bucket": 4 << 20, "prefetch": 1}


# ---- run


CASE = Case(dp=2, microbatches=2, optimizer="adamw", layers=8)
CLUSTER = "\ncluster { gpu = h100_sxm  nodes = 2  gpus_per_node = 1 }\n"


def _text(word: str) -> str:
    text = plan_text(replace(CASE, state=word)) + CLUSTER
    return text.replace("hidden = 16 ", "hidden = 192 ").replace("ffn = 24 ", "ffn = 768 ")


@pytest.mark.long
def test_a_run_is_that_of_the_size_to_the_last_bit(tmp_path: Path) -> None:
    """On two ranks, in float64."""
    auto = _compiled(_text("bucket = auto"))
    size = f"bucket = {auto.flow.largest}B"
    assert _compiled(_text(size)) == auto
    assert _compiled(_text("")).buckets != auto.buckets
    folders = (write_program(_text(word), tmp_path / word) for word in ("bucket = auto", size))
    found, given = (import_module(folder / "train.py") for folder in folders)
    start = harness.initial(CASE, found, seed=5)
    batch = tuple(torch.arange(64).view(8, 8) % (7 + i) for i in range(2))
    (own,), (other,) = (harness.run(CASE, module, start, [batch], 0.1) for module in (found, given))
    assert own.loss == other.loss
    assert all(torch.equal(own.parameters[key], other.parameters[key]) for key in other.parameters)
    assert not all(torch.equal(own.parameters[key], start[key]) for key in start)
