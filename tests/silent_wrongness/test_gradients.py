"""Gradients that are not summed where a value was used by several ranks or in several places: rows
10, 18, 20 to 23, 26 to 28; and what backward gathers once more: row 83.

Most are planted twice: in the IR, where types refuse them; and in the compiler's own tables, by
which types are inferred, where only values tell.
"""

import pytest
from attrs import evolve

from helpers.plan_table import PLANS
from helpers.planted_defects import TEXTS, Defect, lowered, parameters, results_of, wrong
from helpers.programs import get_error_code
from helpers.small_plans import Plan
from scalec.compiler.ir import Kind, Op, placements
from scalec.compiler.ops import OPS, TypingError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.testing.audit.mutants.edits import instead, replaced

NORMS = "g_vectors.1: f64[flat_vectors] = coerce(g_vectors) <axes=[dp, tp], from=P, to=I>"
REDUCED = 'all_reduce_(gradients["vectors"], dp_tp)'


def compiled_anew(plan: str) -> set[str]:
    """The results that differ of a plan that is compiled by whatever the compiler's tables now
    say.
    """
    source = Source("tiny.scale", TEXTS[plan])
    return wrong(compile_plan(source), compile_plan(source, "resolve"))


def test_row_10_a_gradient_is_reduced_in_another_group() -> None:
    """Gradients of experts, which have a group of their own, were reduced in the dense one
    (Megatron#1628, #1622).  Here matrices over `ep`, used by each rank of `tp` on its part of the
    sequence."""
    made = (
        "g_layers_matrices.1: f64[flat_layers_matrices@ep] = coerce(g_layers_matrices)"
        " <axes=[tp], from=P, to=I>"
    )
    defect = Defect(
        "two tensor axes",
        ir={made: made.replace("[tp]", "[ep]")},
        text={
            'all_reduce_(gradients["layers.matrices"], tp)': (
                'all_reduce_(gradients["layers.matrices"], ep)'
            )
        },
    )
    assert "coerce leads from P on ep, but its operand is S(flat_layers_matrices)" in defect.types()
    assert defect.values() == results_of("w_gate", "w_up", "w_down")
    assert (
        "nothing in the IR does `all_reduce_(gradients['layers.matrices'], ep)`"
        in defect.emission()
    )


def test_row_18_a_gather_without_a_backward() -> None:
    """A gather that autograd does not know cut a router off from its loss (Automodel PR #2995,
    transformers#48687).  Here the gather before the MLP; every type fits."""
    lost = "d_m.2: f64[seq, batch@dp, hidden]{tp: P} = add(d_m, d_m.1)"
    defect = Defect(
        "llama",
        ir={lost: lost.replace("add(d_m, d_m.1)", "zeros()")},
        text={"m = all_gather(m, self.tp, dim=0)": "m = all_gather(m.detach(), self.tp, dim=0)"},
    )
    assert defect.types() == ""
    assert {"gradient of norm2", "gradient of wo", "gradient of wte"} < defect.values()
    assert not {"loss", "gradient of norm", "gradient of head"} & defect.values()
    assert "nothing in the IR does" in defect.emission()


@pytest.mark.parametrize("kind", ["silu", "rope", "attention"])
def test_row_18_a_parameter_without_a_gradient_does_not_compile(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an adjoint forgets its operands, what only they lead to has no gradient."""
    monkeypatch.setitem(
        OPS, kind, evolve(OPS[kind], adjoint=lambda op, grads, b: [None] * len(op.inputs))
    )
    with pytest.raises(AssertionError, match="differentiate: a parameter has no gradient"):
        compiled_anew("llama")


def test_row_20_gradients_of_norms_under_sequence_parallelism() -> None:
    """Each rank updated a norm's weight by its own part of the sequence (Megatron#1446,
    TransformerEngine#435, gpt-neox PR #1257)."""
    partial = NORMS.replace("[flat_vectors]", "[flat_vectors]{tp: P}").replace("dp, tp", "dp")
    defect = Defect(
        "llama", ir={NORMS: partial}, text={REDUCED: 'all_reduce_(gradients["vectors"], dp)'}
    )
    assert "sum_squares is not linear in what is partial on tp" in defect.types()
    assert defect.values() == results_of("norm1", "norm2", "norm")
    assert "nothing in the IR does `all_reduce_(gradients['vectors'], dp)`" in defect.emission()


def test_row_20_backward_says_that_the_sum_over_a_sharded_sequence_is_whole() -> None:
    """No op may say so: the gradient of a weight that every rank uses on its own part is a sum
    still to be done.
    """
    made = "d_norm: f64[hidden]{dp: P, tp: P} = vjp(d__n.1"
    defect = Defect("llama", ir={made: made.replace(", tp: P", "")})
    assert "d_norm is" in defect.types()


def test_row_21_a_norm_of_queries_keeps_its_partial_gradient() -> None:
    """A weight that every rank uses on its own heads lost its pending sum by a bare `to_local`
    (torchtitan#2217, PR #2532)."""
    reduced = "d_qn.3: f64[layers, head_dim] = coerce(d_qn.2) <axes=[dp, tp], from=P, to=I>"
    partial = reduced.replace("head_dim]", "head_dim]{tp: P}").replace("dp, tp", "dp")
    defect = Defect(
        "normed queries",
        ir={reduced: partial},
        text={REDUCED: 'all_reduce_(gradients["vectors"], dp)'},
        after="place_state",
    )
    assert "sum_squares is not linear in what is partial on tp" in defect.types()
    assert defect.values() == results_of("qn")
    assert "nothing in the IR does `all_reduce_(gradients['vectors'], dp)`" in defect.emission()


REDUCTION = "_y.2: f64[batch@dp, seq, hidden] = coerce(_y.1)"
ACTIVATION = "_g.1: f64[batch@dp, seq, hidden] = silu(_y.2)"


@pytest.fixture
def pending() -> Defect:
    """The reduction stands after an activation, instead of before it."""
    return Defect(
        "activation of a row",
        ir={
            REDUCTION: f"_g.2: f64[batch@dp, seq, hidden]{{tp: P}} = silu(_y.1) !tiny.scale:5"
            f" {REDUCTION}",
            ACTIVATION: ACTIVATION.replace("silu(_y.2)", "coerce(_g.2) <axes=[tp], from=P, to=I>"),
        },
        text={"u = all_reduce(u, self.tp)": "u = u", "silu(u)": "all_reduce(silu(u), self.tp)"},
    )


def test_row_22_a_nonlinear_function_of_a_pending_sum(pending: Defect) -> None:
    """`max`, `min` and norms were taken of what was still to be summed (pytorch PR #165962)."""
    assert "silu is not linear in what is partial on tp" in pending.types()
    assert {"loss", "norm", "gradient of u", "gradient of w"} < pending.values()
    assert "nothing in the IR does `silu(u)`" in pending.emission()


def test_row_22_the_table_says_that_a_function_is_linear(
    pending: Defect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then types fit, and the values are still wrong."""
    monkeypatch.setitem(OPS, "silu", evolve(OPS["silu"], linear=((0,),)))
    assert pending.types() == ""
    assert "loss" in pending.values()


def test_row_22_a_norm_over_a_sharded_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the entry does not ask for the whole dim, each rank divides by the root mean square
    of its own part.
    """
    plan = evolve(PLANS["no repeat"], shard="batch over dp  hidden over tp").text()
    monkeypatch.setitem(TEXTS, "hidden", plan)
    monkeypatch.setitem(
        OPS, "rmsnorm", evolve(OPS["rmsnorm"], unsharded_dims=lambda types, op: frozenset())
    )
    assert "loss" in compiled_anew("hidden")


@pytest.mark.parametrize(("kind", "dual"), [("R", "R"), ("R", "I"), ("P", "P"), ("P", "I")])
def test_row_22_the_gradient_of_a_placement_is_taken_for_another(
    kind: str, dual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`to_local` and `from_local` of partial values changed their gradients (pytorch#172932).  With
    any other duality than the table's no backward has types."""
    monkeypatch.setitem(placements.DUAL, Kind(kind), Kind(dual))
    with pytest.raises((AssertionError, TypingError)):
        compiled_anew("llama")


@pytest.mark.parametrize(
    ("kept", "line"), [("d_wte.1", "linear(n, self.wte)"), ("d_wte", "embedding(tokens, self.wte,")]
)
def test_row_23_one_use_of_a_tied_embedding_gives_no_gradient(kept: str, line: str) -> None:
    """Gradients of the two uses were not reduced together (piper#13, Megatron#656, entrenar#314).

    Every type fits.
    """
    defect = Defect(
        "tied embedding",
        ir={"add(d_wte, d_wte.1)": f"add({kept})"},
        text={line: line.replace("self.wte", "self.wte.detach()")},
    )
    assert defect.types() == ""
    assert defect.values() == results_of("wte")
    assert "nothing in the IR does" in defect.emission()


def test_row_23_stages_that_share_an_embedding_keep_their_parts_of_its_gradient() -> None:
    """Each learned from its own use (piper#13, Megatron#656)."""
    reduced = 'all_reduce_(gradients["matrices"], pp)'
    defect = Defect(
        "stages",
        ir={
            "sum_squares(g_matrices.2)": "sum_squares(g_matrices.1)",
            "update(g_matrices.2": "update(g_matrices.1",
        },
        text={f"    {reduced}": "    pass"},
    )
    assert "sum_squares" in defect.types()
    assert {"gradient of wte", "updated wte"} <= defect.values()
    assert defect.emission()


def test_row_23_a_weight_is_tied_or_declared_twice() -> None:
    """Two copies that should be one cannot be written."""
    assert (
        get_error_code(TEXTS["llama"].replace("head[hidden -> vocab]", "wte[hidden -> vocab]"))
        == "E0208"
    )


def test_row_26_gradients_of_keys_and_values_that_several_ranks_hold() -> None:
    """With fewer key/value heads than ranks the copies' gradients were not summed: a loss of 3.74
    where 2.64 was right (bigcode Megatron PR #37, transformers#48307, torchtitan PR #2577)."""
    made = (
        "g_layers_matrices.1: f64[flat_layers_matrices@tp_0] = coerce(g_layers_matrices)"
        " <axes=[tp_1], from=P, to=I>"
    )
    kept = (
        "g_layers_matrices.1: f64[flat_layers_matrices@tp_0]{tp_1: P} ="
        ' cast(g_layers_matrices) <dtype="f64">'
    )
    defect = Defect(
        "two key/value heads on four ranks",
        ir={made: kept},
        text={'all_reduce_(gradients["layers.matrices"], tp_1)': ""},
    )
    assert "sum_squares is not linear in what is partial on tp_1" in defect.types()
    assert defect.values() == results_of("wk", "wv")
    assert "nothing in the IR does `sum_squares(gradients['layers.matrices'])`" in defect.emission()


def test_row_26_query_heads_without_the_heads_that_they_attend_to() -> None:
    """Which key/value heads a rank's queries need would depend on the rank."""
    apart = evolve(PLANS["data, tensor"], shard="batch over dp  heads, ffn over tp").text()
    assert get_error_code(apart) == "E0609"


@pytest.mark.parametrize(("heads", "kv_heads"), [("a, tp", "tp"), ("tp", "a, tp")])
def test_row_26_key_value_heads_over_the_inner_of_two_axes(heads: str, kv_heads: str) -> None:
    """As many key/value heads on each rank as it should have, but not those that its query
    heads attend to.
    """
    plan = Plan(mesh="a = 2  tp = 2", shard=f"heads over {heads}  kv_heads over {kv_heads}").text()
    assert get_error_code(plan) in ("E0510", "E0609")


def test_row_27_gradients_are_reduced_over_one_of_two_data_axes() -> None:
    """A hybrid mesh became a flat one (UniRL PR #410).  Here gradients of two data axes
    are reduced over one, so that replicas part.  `test_runs` builds the wrong mesh."""
    made = "g_vectors.1: f64[flat_vectors] = coerce(g_vectors) <axes=[replica, dp, tp]"
    flat = made.replace("[flat_vectors]", "[flat_vectors]{replica: P}").replace(
        "replica, dp, tp", "dp, tp"
    )
    defect = Defect(
        "three axes",
        ir={made: flat},
        text={'mesh.axis("replica", "dp", "tp")': 'mesh.axis("dp", "tp")'},
    )
    assert "sum_squares is not linear in what is partial on replica" in defect.types()
    assert defect.values() == results_of("norm1", "norm2", "norm")
    assert (
        "nothing in the IR does `all_reduce_(gradients['vectors'], replica_dp_tp)`"
        in defect.emission()
    )


def test_row_27_a_turn_forgets_the_outer_of_two_data_axes() -> None:
    """As above, where each layer reduces its own gradients: scattered inside, and not added up
    outside.
    """
    name = "layers_matrices"
    made = f"g_{name}.2: f64[flat_{name}@dp*tp] = coerce(g_{name}.1) <axes=[replica], from=P, to=I>"
    defect = Defect(
        "shared parameters, copied outside",
        ir={
            made: f"g_{name}.2: f64[flat_{name}@dp*tp]{{replica: P}} = cast(g_{name}.1)"
            ' <dtype="f64">'
        },
        text={'reduce_axes=("replica",),': ""},
    )
    assert f"g_{name}.3 is" in defect.types()
    assert results_of("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down") <= defect.values()
    assert "reduce_axes" in defect.emission()


def test_row_28_an_axis_of_size_1_beside_another_takes_the_reduction_with_it() -> None:
    """A shard dim of one rank was taken for nothing to synchronise, over the other dim too (verl PR
    #7494, pytorch#154888)."""
    made = "g_params.1: f64[flat_params] = coerce(g_params) <axes=[dp], from=P, to=I>"
    kept = 'g_params.1: f64[flat_params]{dp: P} = cast(g_params) <dtype="f64">'
    defect = Defect(
        "tensor axis of size 1", ir={made: kept}, text={'all_reduce_(gradients["params"], dp)': ""}
    )
    assert "sum_squares is not linear in what is partial on dp" in defect.types()
    assert defect.values() == results_of(*parameters("tensor axis of size 1"))
    assert "nothing in the IR does `sum_squares(gradients['params'])`" in defect.emission()


def test_row_30_backward_drops_others_than_forward() -> None:
    """As where a generator has moved on when something is computed again: loss right, and no
    type differs.
    """
    back = (
        'd_x.7: f64[seq@tp, batch@dp, hidden] = vjp(d_x.6, draws) <of="dropout", wrt=[x],'
        " p=0.1, site=1>"
    )
    defect = Defect("dropout", ir={back: back.replace("site=1", "site=2")})
    assert defect.types() == ""
    assert defect.values() == results_of("wte")


@pytest.mark.parametrize(
    ("lost", "dim"), [("split={0: self.tp}", "seq"), ("split={2: self.tp}", "ffn")]
)
def test_row_30_each_rank_drops_from_its_part_as_from_the_first(lost: str, dim: str) -> None:
    """All ranks of a sharded dim then drop alike.  No type knows of it."""
    defect = Defect("dropout", text={f", {lost}": ""})
    assert "nothing in the IR does `dropout(" in defect.emission()
    (first,) = [op for op in defect.program.ops if op.kind == "dropout" and _splits(op, dim)][:1]
    alike = instead(first, "as_first", **dict(first.attrs), **{"op": "dropout", "part of": dim})
    found = wrong(replaced(defect.program, first, alike), lowered("dropout", "resolve"))
    assert {"loss", "norm", "gradient of wte"} < found


def test_row_83_backward_gathers_in_another_group_than_forward() -> None:
    """What it recomputes came from the wrong ranks, or was put together along another dim
    (Megatron#7452, finding 04)."""
    gather = "m.4: f64[seq, batch@dp, hidden]{tp: R} = coerce(m.3) <axes=[tp], from=S(seq), to=R>"
    defect = Defect(
        "regather",
        ir={gather: gather.replace("axes=[tp]", "axes=[dp]")},
        text={"regather(m, self.tp, dim=0)": "regather(m, self.tp, dim=1)"},
    )
    assert "coerce leads from S(seq) on dp, but its operand is S(batch)" in defect.types()
    assert "`regather(m, self.tp, dim=1)`" in defect.emission()
    others = (
        gather.replace("m.4:", "m.9:")
        + " !tiny.scale:12 m.4: f64[seq, batch@dp, hidden]{tp: R} = shifted(m.9) <axes=[dp]>"
    )
    assert results_of("w_gate", "w_up") <= Defect("regather", ir={gather: others}).values()


def _splits(op: Op, dim: str) -> bool:
    return bool(op.outputs[0].type.axes_of(dim))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "plan",
    [
        "tensor axis of size 1",
        "axes of size 1",
        "axes of size 1, shared",
        "a repeat of one, shared",
        "unused tensor axis of size 1",
        "a repeat of one",
        "one key/value head",
        "one microbatch",
    ],
)
def test_row_28_axes_and_dims_of_size_1(plan: str) -> None:
    """Nothing is lost where an axis has one rank, or a dim one element: the step is the single
    device's.
    """
    assert Defect(plan).values() == set()
