"""Plans with a setting changed: each is another plan, and rules that are written out mean what
they meant.
"""

from pathlib import Path

import pytest

from scalec.compiler.frontend import resolve
from scalec.compiler.ir import Program
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.changes import (
    make_changed_variant,
    neighbours,
    sequence_parallelism,
    strategies,
)
from scalec.compiler.tuning.variant import Change

ROOT = Path(__file__).parents[2]
TINY = ["tiny_llama", "tiny_pipeline", "tiny_five", "tiny_hybrid"]
CLUSTER = "cluster { gpu = h100_sxm }"


def plan(name: str, *sections: str) -> Source:
    """A shipped plan or an example, with other sections."""
    folder = "plans" if (ROOT / "plans" / f"{name}.scale").exists() else "examples"
    return Source(
        str(ROOT / folder / "plan.scale"), f'use "{name}.scale" {{ {" ".join(sections)} }}'
    )


def settings(model: Program) -> tuple[object, ...]:
    """All that a neighbour may change."""
    claims = {(it.dim, it.axis, it.zigzag, it.via) for it in model.claims}
    axes = [(axis.name, axis.size) for axis in model.axes]
    return model.train, model.flow, model.state, model.pipeline, claims, axes


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*TINY, "06_mlp", "08_experts"])
def test_each_neighbour_is_another_plan(name: str) -> None:
    """None that is listed twice or is the plan itself."""
    source = plan(name, CLUSTER)
    model = resolve(source)
    changes = [*neighbours(model)]
    assert len({str(it) for it in changes}) == len(changes)
    made = [found for it in changes if (found := make_changed_variant(source, [it]))]
    assert len(made) >= 5
    assert all(settings(it.program) != settings(model) for it in made)


@pytest.mark.parametrize(
    ("train", "is_listed"),
    [
        ("precision = bf16", True),
        ("precision = bf16  reduce = fp32", True),
        ("precision = bf16  reduce = bf16", False),
        ("precision = bf16  master = bf16", False),
        ("precision = fp32", False),
    ],
)
def test_gradients_in_bf16_are_a_neighbour_of_those_in_fp32(train: str, is_listed: bool) -> None:
    changes = map(str, neighbours(resolve(plan("tiny_llama", CLUSTER, f"train {{ {train} }}"))))
    assert ("train { reduce = bf16 }" in changes) == is_listed


MOST = 40
"""How many neighbours a plan may have: each is compiled when its time is explained."""


@pytest.mark.parametrize(
    "path", sorted((ROOT / "plans").glob("*.scale")), ids=lambda path: path.stem
)
def test_there_are_few_enough(path: Path) -> None:
    assert len([*neighbours(resolve(load(path)))]) <= MOST


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_pipeline", "06_mlp"])
def test_a_sequence_parallel_plan_has_one_that_is_not_and_back(name: str) -> None:
    source = plan(name, CLUSTER)
    (once,) = sequence_parallelism(resolve(source))
    other = make_changed_variant(source, [once])
    assert other
    (back,) = sequence_parallelism(other.program)
    assert {"with": "without", "without": "with"}[once.summary.split()[1]] == back.summary.split()[
        1
    ]
    same = make_changed_variant(source, [back])
    assert same
    assert settings(same.program)[3:] == settings(resolve(source))[3:]


def test_other_strategies_keep_all_other_rules() -> None:
    source = plan("llama3_405b_long")
    model = resolve(source)
    found = [make_changed_variant(source, [it]) for it in strategies(model)]
    ring = next(it for it in found if it and "ring" in str(it.changes[0]))
    assert {it.via for it in ring.program.claims} == {"", "ring"}
    assert {(it.dim, it.axis) for it in ring.program.claims} == {
        (it.dim, it.axis) for it in model.claims
    }
    assert ring.program.pipeline
    assert ring.program.pipeline.dims == ("layers",)


def test_what_makes_no_plan_is_none() -> None:
    source = load(ROOT / "plans" / "tiny_llama.scale")
    assert make_changed_variant(source, [Change("train", "microbatch = 3")]) is None
    both = make_changed_variant(
        source, [Change("train", "microbatch = 2"), Change("train", "recompute = full")]
    )
    assert both
    assert (both.program.train.microbatch, both.program.train.recompute.word) == (2, "full")
