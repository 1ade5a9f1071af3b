"""Three makers of one rule: which positions each rank holds, as the compiler, the proof and the
runtime have it.
"""

from itertools import product

import pytest

from scalec.compiler.ir import Axis, Claim, Dim, Program, Region, Type, sharded
from scalec.compiler.ir.splits import runs_of_ranks
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.syntax.source import Source
from scalec.runtime.comm.positions import chunks

SPAN = Source("plan.scale", "").whole()
WAYS = [(ranks, zigzag) for ranks in range(1, 7) for zigzag in (False, True)]
CUTS = [
    *((way,) for way in WAYS),
    *(two for two in product(WAYS, WAYS) if two[0][0] * two[1][0] <= 12),
]


def _program(cuts: tuple[tuple[int, bool], ...], size: int) -> Program:
    axes = tuple(Axis(f"a{i}", ranks, f"a{i}", span=SPAN) for i, (ranks, _) in enumerate(cuts))
    claims = tuple(
        Claim(i, "seq", f"a{i}", True, zigzag, span=SPAN) for i, (_, zigzag) in enumerate(cuts)
    )
    region, settings = Region("model", (), span=SPAN), (None, None)
    return Program(
        "p", "propagate", axes, (Dim("seq", size, span=SPAN),), claims, (), region, *settings
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cuts", CUTS, ids=lambda cuts: "-".join(f"{n}{'z' * zigzag}" for n, zigzag in cuts)
)
def test_positions_are_the_same_for_all_three(cuts: tuple[tuple[int, bool], ...]) -> None:
    least = 1
    for ranks, zigzag in cuts:
        least *= ranks * (1 + zigzag)
    for size in range(least, 25, least):
        program = _program(cuts, size)
        type = Type("i64", ("seq",), tuple((axis.name, sharded("seq")) for axis in program.axes))
        evaluated = (
            SimulatedMesh.of_program(program).indices(type, "seq").reshape(-1, size // _ranks(cuts))
        )
        counted = [
            [at for start, stop in runs for at in range(start, stop)]
            for runs in runs_of_ranks(program, type, "seq")
        ]
        assert evaluated.tolist() == counted
        places = product(*(range(ranks) for ranks, _ in cuts))
        for own, place in zip(counted, places, strict=True):
            runs = chunks(
                size,
                tuple((ranks, at, zigzag) for (ranks, zigzag), at in zip(cuts, place, strict=True)),
            )
            assert [at for start, length in runs for at in range(start, start + length)] == own


def _ranks(cuts: tuple[tuple[int, bool], ...]) -> int:
    found = 1
    for ranks, _ in cuts:
        found *= ranks
    return found


def test_a_zigzag_computes_as_many_causal_pairs_on_all_ranks() -> None:
    """And contiguous parts do not: rank r of n has 2 r + 1 of n² parts of the square below the
    diagonal.
    """
    for ranks in range(1, 7):
        size = 24 * ranks
        for zigzag in (False, True):
            program = _program(((ranks, zigzag),), size)
            type = Type("i64", ("seq",), (("a0", sharded("seq")),))
            pairs = [
                sum(at + 1 for run in runs for at in range(*run))
                for runs in runs_of_ranks(program, type, "seq")
            ]
            assert (len({*pairs}) == 1) is (zigzag or ranks == 1)
