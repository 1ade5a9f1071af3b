"""An axis with a range: its sizes, and the program at each, which is the one that a plan of
that size compiles to.
"""

import re
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.small_plans import DIMS, LLAMA, WITH_SEQ, Plan
from scalec.compiler.analysis.elastic import (
    at_size,
    every_size,
    get_left_out_words,
    sizes,
    smallest,
)
from scalec.compiler.analysis.memory import account
from scalec.compiler.emit import emit
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.schedules.csv_file import csv
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.testing import plans

SEEN = LLAMA.replace(
    "attention(q, k, v, mask=causal)", "attention(q, k, v, mask=causal, documents=documents)"
)
FOUR_LAYERS = DIMS.replace("layers = 2", "layers = 4")
PLANS = {
    "plain": Plan(mesh="dp = DP", shard="batch over dp"),
    "zero_1": Plan(mesh="dp = DP  tp = 2", shard=WITH_SEQ, state="zero 1 over dp", clip=1.0),
    "zero_2": Plan(mesh="dp = DP  tp = 2", shard=WITH_SEQ, state="zero 2 over dp  bucket = 1KiB"),
    "zero_3": Plan(
        mesh="dp = DP", shard="batch over dp", state="zero 3 over dp", train="recompute = full"
    ),
    "fp16": Plan(
        mesh="dp = DP", shard="batch over dp", state="zero 1 over dp", train="precision = fp16"
    ),
    "hybrid": Plan(
        mesh="dp = DP  cp = 2", shard="batch over dp  seq over cp", state="zero 3 over cp"
    ),
    "context": Plan(
        mesh="dp = DP  cp = 2",
        shard="batch over dp  seq over cp via ring",
        state="zero 1 over dp, cp",
    ),
    "1f1b": Plan(
        mesh="dp = DP  pp = 2", shard="batch over dp  layers over pp", state="zero 1 over dp"
    ),
    "interleaved_1f1b": Plan(
        mesh="pp = 2  dp = DP",
        shard="batch over dp  layers over pp",
        state="zero 3 over dp",
        dims=FOUR_LAYERS,
    ),
    "zbv": Plan(mesh="pp = 2  dp = DP", shard="batch over dp  layers over pp", dims=FOUR_LAYERS),
    "documents": Plan(
        SEEN, mesh="dp = DP", shard="batch over dp", inputs=", documents[batch, seq]"
    ),
}
PIPELINES = {"1f1b": "", "interleaved_1f1b": "pipeline { schedule = interleaved_1f1b(chunks=2) }"}
PIPELINES |= {"zbv": "pipeline { schedule = zbv }"}
FOUR, TWO = 4, 2


def _source(name: str, dp: str) -> Source:
    plan = evolve(
        PLANS[name],
        ranks=FOUR,
        microbatch=FOUR,
        data="separator = 10" if name == "documents" else "",
    )
    return Source("plan.scale", plan.text().replace("DP", dp) + PIPELINES.get(name, ""))


def _without_range(program: Program) -> Program:
    return evolve(program, axes=tuple(evolve(axis, within=None) for axis in program.axes))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PLANS)
def test_the_program_at_each_size_is_that_of_a_plan_of_that_size(name: str) -> None:
    """Before any pass and after the last one."""
    for stage in ("resolve", "schedule_pipeline"):
        elastic = compile_plan(_source(name, "2..4"), stage)
        assert sizes(elastic) == (FOUR, TWO)
        for size in (FOUR, TWO):
            found = at_size(elastic, size)
            assert _without_range(found) == compile_plan(_source(name, str(size)), stage)
            assert at_size(found, FOUR) == elastic
            assert read_ir(Source("ir", print_ir(found))) == found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PLANS)
def test_one_text_is_the_step_at_each_size(name: str) -> None:
    """The read-back matches one file to the IR of every size; the plans of single sizes have
    the same code.
    """
    model = compile_plan(_source(name, "1..4"), "resolve")
    program = lower(model)
    proof = verify(program, model)
    assert (proof.elastic, len(proof.meshes)) == ("dp 4, 2 or 1", 4 if len(program.axes) > 1 else 3)
    text = emit(program, _source(name, "1..4"), model, proof)["train.py"]
    for each in every_size(program):
        check(text, each)
    wrong = text.replace("microbatches=8", "microbatches=7")
    assert wrong != text
    with pytest.raises(AssertionError, match="`smaller` is"):
        check(wrong, program)
    single = compile_plan(_source(name, "2"))
    assert _steps(emit(single, _source(name, "2"))["train.py"]) == _steps(text)


def _steps(text: str) -> list[str]:
    """Classes and functions, without comments, which have one size's numbers."""
    text = re.sub(r"^PIPELINE = .*?^\)", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.split("  #")[0] for line in text.split("\n")]
    return [
        line
        for line in lines[lines.index("import torch") : lines.index("PLAN = Plan(")]
        if "SmallerMesh" not in line
    ]


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 64), st.integers(1, 3)
)
def test_sizes_are_those_with_whole_microbatches(
    least: int, more: int, rows: int, batch: int, others: int
) -> None:
    most = least + more
    text = Plan(
        "x = embedding(tokens, head[vocab, hidden])  loss = cross_entropy(x @ head, labels)"
    ).text()
    text = text.replace("mesh {  }", f"mesh {{ replica = {others}  dp = {least}..{most} }}")
    text = text.replace("shard {  }", "shard { batch over replica, dp }")
    text = text.replace(
        "global_batch = 8  microbatch = 4", f"global_batch = {batch}  microbatch = {rows}"
    )
    whole = [n for n in range(most, least - 1, -1) if batch % (n * rows * others) == 0]
    if not whole:
        with pytest.raises(PlanError) as caught:
            compile_plan(Source("plan.scale", text))
        assert "E0310" in [found.code for found in caught.value.diagnostics]
        return
    program = compile_plan(Source("plan.scale", text))
    assert sizes(program) == (*whole,)
    for each, (name, size) in product(
        every_size(program), {"microbatches": batch, "batch": 1}.items()
    ):
        ranks = each.axis("dp").size * others
        assert each.size(name) == (
            size // (rows * ranks) if name == "microbatches" else rows * ranks
        )
    out = [n for n in range(least, most + 1) if n not in whole]
    assert bool(out) == bool(get_left_out_words(program))
    for first, last in re.findall(r"(\d+)(?: … (\d+))?[,:]", get_left_out_words(program)):
        run = [*range(int(first), int(last or first) + 1)]
        assert out[: len(run)] == run
        out = out[len(run) :]
    assert not out


def test_left_out_sizes_have_their_arithmetic() -> None:
    text = _source("plain", "4..8").text.replace(
        "global_batch = 8  microbatch = 1", "global_batch = 64  microbatch = 4"
    )
    program = compile_plan(Source("plan.scale", text))
    assert sizes(program) == (8, 4)
    assert (
        get_left_out_words(program)
        == "dp 5 … 7: 64 sequences are not microbatches of 4 on as many ranks"
    )


def test_memory_is_enough_at_the_least_size() -> None:
    """`recompute = auto` takes what the least size needs, though the largest needs less."""
    text = (
        PLANS["zero_3"]
        .text()
        .replace("DP", "1..4")
        .replace("global_batch = 8  microbatch = 4", "global_batch = 8  microbatch = 2")
    )
    free = compile_plan(Source("plan.scale", text.replace("recompute = full", "recompute = none")))
    most = account(smallest(free)).total - 1
    assert account(free).total < most
    found = compile_plan(
        Source(
            "plan.scale", text.replace("recompute = full", f"recompute = auto(memory = {most}B)")
        )
    )
    assert account(smallest(found)).total <= most
    assert found.recomputed


def test_rows_that_are_made_for_one_number_of_microbatches_have_no_range(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(csv(SCHEDULES["1f1b"](2, 2, None)))
    text = _source("1f1b", "2..4").text
    for schedule, of in (("auto", "`schedule = auto`"), ('file("rows.csv")', "a file")):
        with pytest.raises(PlanError) as caught:
            compile_plan(
                Source(str(tmp_path / "p.scale"), f"{text}\npipeline {{ schedule = {schedule} }}")
            )
        (found,) = caught.value.diagnostics
        assert (found.code, found.label) == ("E0520", "2 microbatches with 4, 4 with 2")
        assert f"rows of {of} are for one number" in found.message


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_random_plans_have_their_program_at_each_size(text: str) -> None:
    """The outermost axis of `batch` gets a range."""
    begin = text.index("mesh")
    rule = re.search(r"batch over (\w+)", text)
    if not rule:
        return
    axis = rule[1]
    size = re.search(rf"\b{axis} = (\d+)", text[begin:])
    assert size

    def sized(said: str) -> Source:
        return Source(
            "plan.scale", text[:begin] + text[begin:].replace(size[0], f"{axis} = {said}", 1)
        )

    try:
        program = compile_plan(sized(f"1..{2 * int(size[1])}"))
    except PlanError:
        return  # for something else lies over the axis, or the batch has no such microbatches
    for each in every_size(program):
        check(train_py(program, sized("1")), each)
        if (ranks := each.axis(axis).size) > 1:
            assert _without_range(each) == compile_plan(sized(str(ranks)))
