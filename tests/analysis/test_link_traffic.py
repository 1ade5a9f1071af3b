"""How much each rank sends in a step, over which links, and how a person is told."""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve

from helpers.timed_plans import WASTEFUL
from helpers.zero_plans import ALL, REST, compiled, plan_text, program
from scalec.compiler import cli
from scalec.compiler.analysis.communication import collectives
from scalec.compiler.analysis.link_traffic import crosses, get_sent_bytes, volumes
from scalec.compiler.reports.explain import explain_collectives
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"

# ---- how much: Rajbhandari et al. 2020, section 7, for Ψ parameters; each microbatch has a forward
# and a backward


def zero(stage: int, microbatches: int) -> int:
    """What a rank sends in a step, in Ψ.

    An all-reduce is a reduce-scatter and an all-gather of Ψ each (7.1).  With optimizer state
    shared out (stage 1) the updated parameters are gathered in place of the sums; with gradients
    (stage 2) sums are scattered whenever they are made (7.2.1).  With parameters (stage 3) these
    are gathered for each forward and for each backward (7.2.2).
    """
    scattered = 1 if stage < 2 else microbatches
    gathered = 1 if stage < 3 else 2 * microbatches
    return scattered + gathered


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", range(4))
def test_volumes_are_those_of_the_paper(stage: int, microbatches: int, ranks: int) -> None:
    of = program(f"zero {stage} over dp", microbatches, f"dp = {ranks}")
    listed = collectives(of)
    layers, rest = volumes(of, listed)
    assert (layers.layers, layers.buckets, layers.parameters) == (("layers",), 1, ALL)
    assert layers.gathered + layers.reduced == zero(stage, microbatches) * ALL
    assert (rest.layers, rest.parameters, rest.gathered + rest.reduced) == ((), REST, 2 * REST)
    layers, others = (
        sum(get_sent_bytes(it) for it in listed if it.bucket == bucket.name)
        for bucket in of.buckets
    )
    assert layers * ranks == 4 * (ranks - 1) * zero(stage, microbatches) * ALL
    assert others * ranks == 4 * (ranks - 1) * 2 * REST


def test_volumes_of_a_mixture_and_of_replicas() -> None:
    mixed = program("parameters, optimizer over dp", 4)
    assert volumes(mixed, collectives(mixed))[0].gathered == 2 * 4 * ALL
    assert volumes(mixed, collectives(mixed))[0].reduced == ALL
    hybrid = program("zero 3 over dp", 4, "replica = 2 dp = 4")
    assert volumes(hybrid, collectives(hybrid))[0].reduced == 4 * (ALL + 2 * ALL // 4)


def test_parameters_are_gathered_in_the_dtype_of_the_model() -> None:
    listed = collectives(
        compiled(plan_text("zero 3 over dp").replace("steps = 1", "steps = 1  precision = bf16"))
    )
    assert {(it.use, it.dtype) for it in listed if it.bucket} == {
        ("parameters", "bf16"),
        ("gradients", "f32"),
    }


# ---- over which links


def _groups(sizes: dict[str, int], axes: Sequence[str]) -> Iterator[list[int]]:
    """The ranks of each group over `axes`, by their places on the mesh."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, places in enumerate(product(*map(range, sizes.values()))):
        fixed = tuple(place for name, place in zip(sizes, places, strict=True) if name not in axes)
        groups.setdefault(fixed, []).append(rank)
    return iter(groups.values())


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("axes", ["a", "b", "c", "ab", "ac", "bc", "abc"])
def test_which_groups_leave_a_machine(axes: str, per_node: int) -> None:
    base = program("zero 0 over dp")
    sizes = {"a": 2, "b": 3, "c": 4}
    mesh = evolve(
        base, axes=tuple(evolve(base.axes[0], name=name, size=size) for name, size in sizes.items())
    )
    leaves = any(len({rank // per_node for rank in group}) > 1 for group in _groups(sizes, axes))
    assert crosses(mesh, tuple(axes), per_node) == leaves


# ---- what is shown

SHOWN = """tiny: 896 parameters on 8 ranks, replica 2 x dp 4

each rank sends 14.3 KiB in a step, 1.5 KiB of it across nodes

parameters gathered                    where and how often                  calls  the whole     sent          links
all_gather over dp, 4 ranks            forward, 2 microbatches x 5 layers      10  128 x f32  3.8 KiB  within a node
all_gather over dp, 4 ranks            backward, 2 microbatches x 5 layers     10  128 x f32  3.8 KiB  within a node
all_gather over dp, 4 ranks            step                                     1  256 x f32    768 B  within a node
total                                                                          21             8.2 KiB

gradients reduced                      where and how often                  calls  the whole     sent          links
reduce_scatter over dp, 4 ranks        backward, 2 microbatches x 5 layers     10  128 x f32  3.8 KiB  within a node
all_reduce over replica, 2 ranks       backward, 2 microbatches x 5 layers     10   32 x f32  1.2 KiB   across nodes
reduce_scatter over dp, 4 ranks        step                                     1  256 x f32    768 B  within a node
all_reduce over replica, 2 ranks       step                                     1   64 x f32    256 B   across nodes
total                                                                          22             6.0 KiB

count, loss and norm                   where and how often                  calls  the whole     sent          links
all_reduce over replica x dp, 8 ranks  step                                     1    1 x i64     14 B   across nodes
all_reduce over replica x dp, 8 ranks  step                                     1    1 x f32      7 B   across nodes
all_reduce over dp, 4 ranks            step                                     1    1 x f32      6 B  within a node
total                                                                           3                27 B

parameters on a rank     in          Ψ  gathered  reduced  total
per iteration of layers  1 bucket  640     4.00Ψ    3.00Ψ  7.00Ψ
others                   1 bucket  256     1.00Ψ    1.50Ψ  2.50Ψ

sent: of n ranks in a ring each sends (n - 1)/n of the whole, in an all_reduce twice that
Ψ: a row's parameters, in elements; (n - 1)/n counts as 1 (Rajbhandari et al. 2020), padding of buckets counts too"""


def test_what_is_shown() -> None:
    text = (
        plan_text("zero 3 over dp", 2, "replica = 2 dp = 4")
        + "cluster { gpus_per_node = 4  nodes = 2 }\n"
    )
    assert explain_collectives(compiled(text)) == SHOWN


def test_what_sends_little_is_added_up() -> None:
    of = compile_plan(Source(str(PLANS / "plan.scale"), f'use "llama3_70b.scale" {{ {WASTEFUL} }}'))
    shown = explain_collectives(of).split("\n\n")
    listed = collectives(of)
    for title, use in (("parameters gathered", "parameters"), ("activations", "activations")):
        _, *rows, together = next(part for part in shown if part.startswith(title)).splitlines()
        calls = [
            int(re.findall(r"  ([\d,]+)  ", row)[0].replace(",", "")) for row in (*rows, together)
        ]
        assert sum(calls[:-1]) == calls[-1] == sum(it.count for it in listed if it.use == use)
        assert len(rows) == (9 if use == "activations" else 3)
    assert re.search(r"^2 others  ", explain_collectives(of), re.MULTILINE)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.scale"
    path.write_text(plan_text("zero 1 over dp"))
    assert cli.main(("explain", "collectives", str(path))) == 0
    assert capsys.readouterr().out == explain_collectives(program("zero 1 over dp")) + "\n"


def test_one_rank_sends_nothing() -> None:
    assert explain_collectives(program("", mesh="dp = 1")).endswith(
        "on one rank\n\nno communication"
    )
