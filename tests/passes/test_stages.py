"""Where models are cut: the layers and parameters of stages, and what crosses from one to the
next.
"""

from collections.abc import Mapping

import pytest
from attrs import evolve

from helpers.edited_text import replace_once
from helpers.pipeline_plan import PLAN, compiled
from helpers.uneven_stages import unlike
from scalec.compiler.analysis.stage_schedule import estimate_times
from scalec.compiler.ir import FLOATS, Enter, Op, Pipeline, Program, base, uses, values
from scalec.compiler.ir.stages import Stage, crossing, groups, stages
from scalec.compiler.proof import verify
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

SKIP = {"  repeat layers": "  skip = x * 2\n  repeat layers"}
REST = {
    "layers over pp": "layers, rest over pp",
    "  loss": "  repeat rest { x = x * tanh(g[hidden]) }\n  loss",
}
BRANCHES = {
    "repeat layers {": "repeat layers as i { if i < 2 { x = x * tanh(g[hidden]) } else { x = x +"
    " tanh(b[hidden]) }"
}
NESTED = {
    "repeat layers {\n": (
        "repeat layers { repeat inner { x = x + tanh(x @ a[hidden -> ffn]) @ b[ffn -> hidden] }\n"
    )
}


def cut(edits: Mapping[str, str]) -> tuple[Program, Pipeline]:
    program = compiled(edits, "divide_stages")
    assert program.pipeline
    return program, program.pipeline


def sized(layers: str, stage_to_rank: int = 4) -> dict[str, str]:
    return {"1f1b": f"1f1b  stages = [{layers}]", "pp = 4": f"pp = {stage_to_rank}"}


@pytest.mark.parametrize(
    ("edits", "layers"),
    [
        ({}, (1, 2, 2, 1)),  # the head is dear, and a row more in the middle costs less than two
        ({"pp = 4": "pp = 2"}, (3, 3)),
        ({"vocab = 64": "vocab = 640"}, (2, 2, 2, 0)),
        ({"1f1b": "interleaved_1f1b(chunks=2)"}, (0, 1, 1, 1, 1, 1, 1, 0)),
        (REST, (1, 2, 2, 3)),  # of the last, two are cheap
    ],
    ids=["layers", "two ranks", "a large head", "chunks", "two repeats"],
)
def test_stages_are_as_equally_dear_as_turns_allow(
    edits: dict[str, str], layers: tuple[int, ...]
) -> None:
    program, pipeline = cut(edits)
    assert pipeline.layers == layers
    assert len(pipeline.stage_to_rank) == len(layers)
    assert sum(layers) == sum(program.size(dim) for dim in pipeline.dims)


def test_a_stage_has_turns_of_several_repeats_and_what_stands_between() -> None:
    program, pipeline = cut({**REST, **sized("2, 4, 1, 1")})
    assert stages(program, pipeline) == [
        Stage((0,), (range(0, 2), range(0))),
        Stage((1,), (range(2, 6), range(0))),
        Stage((), (range(6, 6), range(0, 1))),
        Stage((2,), (range(6, 6), range(1, 2))),
    ]


def test_what_stands_between_two_repeats_is_of_the_turn_before() -> None:
    program, pipeline = cut({**REST, **sized("6, 2", 2)})
    assert [stage.groups for stage in stages(program, pipeline)] == [(0, 1), (2,)]


def test_parts_of_a_repeat_are_cut_as_one() -> None:
    program, pipeline = cut({**BRANCHES, "pp = 4": "pp = 2"})
    assert pipeline.dims == ("layers_0", "layers_1")
    assert [claim.dim for claim in program.claims] == ["batch"]
    layers = [stage.layers for stage in stages(program, pipeline)]
    assert [sum(map(len, each)) for each in layers] == [3, 3]
    assert layers[0][0] == range(0, 2)


# ---- what crosses


def carries(program: Program, pipeline: Pipeline) -> list[list[str]]:
    """What each repeat that is cut takes from the statements before it."""
    _, repeats = groups(pipeline, program.region.body)
    return [[arg.source for arg in repeat.args if arg.enter is Enter.CARRY] for repeat in repeats]


def captured(program: Program, pipeline: Pipeline) -> set[str]:
    """The floats that repeats that are cut read besides, at any depth, and that are no
    parameters.
    """
    _, repeats = groups(pipeline, program.region.body)
    read = {name for repeat in repeats for name in uses(evolve(repeat, args=()))}
    own = {value.name for repeat in repeats for value in values(repeat)}
    leaves = {
        stmt.outputs[0].name
        for stmt in program.region.body
        if isinstance(stmt, Op) and stmt.kind == "leaf"
    }
    return {name for name in read - own - leaves if program.types[name].dtype in FLOATS}


@pytest.mark.parametrize(
    ("edits", "count"),
    [
        ({}, [1]),
        ({**SKIP, "x @ head": "(x + skip) @ head"}, [2]),  # used behind
        ({**SKIP, "x = x + silu": "x = skip + silu"}, [2]),  # used inside
        ({**SKIP, "x = x + silu": "x = skip + silu", "x @ head": "(x + skip) @ head"}, [2]),
        # in the second repeat only
        ({**SKIP, **REST, "tanh(g[hidden])": "tanh(g[hidden]) + skip"}, [2, 2]),
        # through both, used twice
        ({**SKIP, **REST, "x @ head": "(x + skip + skip) @ head"}, [2, 2]),
        ({**SKIP, **NESTED, "tanh(x @ a": "tanh(skip * x @ a"}, [2]),  # in a repeat inside
        ({"x @ head[hidden -> vocab]": "x @ wte"}, [1]),  # parameters do not cross
    ],
    ids=["nothing", "behind", "inside", "both", "second", "through two", "nested", "tied"],
)
def test_what_later_statements_read_is_carried(edits: dict[str, str], count: list[int]) -> None:
    program, pipeline = cut(edits)
    assert [len(each) for each in carries(program, pipeline)] == count
    assert not captured(program, pipeline)


@pytest.mark.parametrize(
    ("layers", "crosses"),
    [
        ("[1, 1, 1, 1, 1, 1, 1]", [["x", "s"], ["x", "s"], ["y"], ["y"], ["z"], ["z"]]),
        ("[2, 1, 2, 2, 0]", [["x", "s"], ["y"], ["z"], ["z"]]),
        ("[0, 3, 2, 1, 1]", [["x", "s"], ["y"], ["z"], ["z"]]),
        ("[4, 3]", [["y"]]),
        ("[5, 2]", [["z"]]),
    ],
)
def test_what_crosses_is_of_the_repeat_in_which_a_cut_lies(
    layers: str, crosses: list[list[str]]
) -> None:
    """Of one that lies between two, of the second; behind the last one's layers, of the last."""
    text = unlike(f"1f1b  stages = {layers}").replace("pp = 2", f"pp = {layers.count(',') + 1}")
    program = compile_plan(Source("plan.scale", text))
    assert program.pipeline
    assert [
        [base(value.name) for value in values] for values in crossing(program, program.pipeline)
    ] == crosses


@pytest.mark.parametrize(
    "edits",
    [
        {**SKIP, "x = x + silu": "x = skip + silu", "x @ head": "(x + skip) @ head"},
        {**SKIP, **REST, "tanh(g[hidden])": "tanh(g[hidden]) + skip"},
        BRANCHES,
        {**NESTED, "x @ head[hidden -> vocab]": "x @ wte"},
        {**SKIP, **REST, "x @ head": "(x + skip + skip) @ head", "1f1b": "auto(memory=2)"},
    ],
    ids=["a skip", "a skip into the second", "branches", "nested, tied", "auto"],
)
def test_cut_models_are_proved(edits: dict[str, str]) -> None:
    model = compile_plan(
        Source("plan.scale", replace_once(PLAN, {**edits, "pp = 4": "pp = 2"})), "resolve"
    )
    verify(lower(model), model)


# ---- parameters, costs


def test_which_stages_have_a_parameter() -> None:
    _, pipeline = cut(
        {"x = x + silu": "x = x * g[hidden] + silu", "  repeat": "  x = x * n[hidden]\n  repeat"}
    )
    assert dict(pipeline.param_stages) == {"wte": (0,), "n": (0,), "head": (3,)}
    _, tied = cut({"x @ head[hidden -> vocab]": "x @ wte"})
    assert (tied.param_stages, tied.ranks_of("wte")) == ((("wte", (0, 3)),), (0, 3))


def test_a_parameter_from_outside_is_held_where_turns_use_it() -> None:
    edits = {"  repeat": "  x = x * n[hidden]\n  repeat", "x = x + silu": "x = x * n + silu"}
    _, pipeline = cut({**edits, "vocab = 64": "vocab = 640"})
    assert dict(pipeline.param_stages)["n"] == (0, 1, 2)  # the last stage has no layer


def test_stages_take_the_time_of_their_products() -> None:
    program = compiled(sized("1, 2, 2, 1"), "fuse_buckets")
    assert program.pipeline
    times = estimate_times(program, program.pipeline)
    assert max(times.forward) == 1
    assert times.forward[1] == pytest.approx(2 * times.forward[0], rel=0.05)
    assert times.forward[3] > 1.5 * times.forward[0]  # the head
    for part in times.input, times.weight:
        assert part == pytest.approx(times.forward, rel=0.1)
