"""The programs of stages: what they receive and send, their layers, and their terms of
gradients.
"""

from helpers.proof_pipelines import compiled, piped
from helpers.uneven_stages import unlike
from scalec.compiler.analysis.stage_program import StageProgram, rank_programs, stage_programs
from scalec.compiler.ir import Op, Program
from scalec.compiler.ir.stages import crossing


def _made(text: str) -> tuple[Program, tuple[StageProgram, ...]]:
    program, _ = compiled(text)
    return program, stage_programs(program)


def test_a_stage_receives_what_the_one_before_it_sends() -> None:
    program, stages = _made(unlike())
    assert program.pipeline
    cuts = [[value.type for value in values] for values in crossing(program, program.pipeline)]
    assert [[value.type for value in stage.forward.inputs] for stage in stages] == [[], *cuts]
    assert [len(stage.forward.outputs) for stage in stages] == [*map(len, cuts), 0]
    assert [len(stage.backward.inputs) for stage in stages] == [*map(len, cuts), 0]
    assert [len(stage.backward.outputs) for stage in stages] == [0, *map(len, cuts)]


def test_values_that_begin_as_one_have_names_of_their_own() -> None:
    _, stages = _made(unlike())
    for stage in stages:
        for block in (stage.forward, stage.backward):
            assert len({value.name for value in block.inputs}) == len(block.inputs)


def test_a_stage_has_its_layers_and_no_others() -> None:
    program, stages = _made(unlike())
    assert program.pipeline
    for dim in program.pipeline.dims:
        assert [i for stage in stages for i in stage.layers[dim]] == [*range(program.size(dim))]
        assert [stage.program.size(dim) for stage in stages] == [
            len(stage.layers[dim]) for stage in stages
        ]
        assert sum(own.size(dim) for own in rank_programs(program)) == program.size(dim)


def test_each_stage_of_a_tied_parameter_adds_up_its_own_terms() -> None:
    program, (first, last) = _made(piped("tied embedding"))
    sums = {
        op.outputs[0].name: op
        for op in program.backward.body
        if isinstance(op, Op) and op.kind == "add"
    }
    terms = [
        {
            op.outputs[0].name: op.inputs
            for op in stage.backward.body
            if isinstance(op, Op) and op.kind == "add"
        }
        for stage in (first, last)
    ]
    (total,) = (name for name in sums if all(name in own for own in terms))
    assert {*terms[0][total]} | {*terms[1][total]} == {*sums[total].inputs}
    assert not {*terms[0][total]} & {*terms[1][total]}
