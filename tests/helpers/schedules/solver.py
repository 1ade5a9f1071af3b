"""The least time that any order of a pipeline's work takes, as a constraint solver proves it.

Purpose: `optimum`, a reference that shares no code with `simulate` and `listing`.  It knows actions
as intervals of whole numbers: a rank does one at a time, messages take time and hold nobody up, and
what is held of a microbatch is an interval too, of a height.  Backward is in two parts throughout,
which loses nothing where the second holds no more than the first.  Non-goals: room for messages;
actions that take no time.
"""

from itertools import pairwise, product

from ortools.sat.python import cp_model

from scalec.compiler.schedules.activation_memory import MemoryBudget
from scalec.compiler.schedules.timeline import Times

EFFORT = 20
"""In the solver's own measure, about seconds: more than any case of the tests takes, on however
busy a machine.
"""


def optimum(
    stage_to_rank: tuple[int, ...], microbatches: int, times: Times, room: MemoryBudget
) -> int:
    """The proven least time; fails if it is not found with `EFFORT`."""
    assert all(
        later <= first for later, first in zip(room.keeps.weight, room.keeps.input, strict=True)
    )
    model = cp_model.CpModel()
    takes = {"F": times.forward, "I": times.input, "W": times.weight}
    horizon = int(
        microbatches * (sum(map(sum, takes.values())) + 2 * len(stage_to_rank) * times.send)
    )
    stages, last = range(len(stage_to_rank)), len(stage_to_rank) - 1
    start = {
        (work, s, m): model.new_int_var(0, horizon, f"{work}{s},{m}")
        for work, s, m in product(takes, stages, range(microbatches))
    }
    end = {(work, s, m): at + int(takes[work][s]) for (work, s, m), at in start.items()}
    for s, m in product(stages, range(microbatches)):
        for other, work in ((s - 1, "F"), (s + 1, "I")):
            if 0 <= other <= last:
                model.add(
                    start[work, s, m]
                    >= end[work, other, m]
                    + int(times.send) * (stage_to_rank[other] != stage_to_rank[s])
                )
        model.add(start["I", s, m] >= end["F", s, m])
        model.add(start["W", s, m] >= end["I", s, m])
    # microbatches are alike: the first is that which begins first
    for m, after in pairwise(range(microbatches)):
        model.add(start["F", 0, m] <= start["F", 0, after])
    for rank, most in enumerate(room.most):
        own = [key for key in start if stage_to_rank[key[1]] == rank]
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start[key], int(takes[key[0]][key[1]]), "")
                for key in own
            ]
        )
        spans = [
            (begin, until, size)
            for s, m in product(
                (s for s in stages if stage_to_rank[s] == rank), range(microbatches)
            )
            for begin, until, size in (
                (start["F", s, m], end["I", s, m], room.keeps.input[s]),
                (end["I", s, m], end["W", s, m], room.keeps.weight[s]),
            )
        ]
        if most < horizon * sum(room.keeps.input):
            held = [
                model.new_interval_var(begin, model.new_int_var(0, horizon, ""), until, "")
                for begin, until, _ in spans
            ]
            model.add_cumulative(held, [int(size) for _, _, size in spans], int(most))
    total = model.new_int_var(0, horizon, "total")
    model.add_max_equality(total, list(end.values()))
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = EFFORT
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)
