"""Routes: what a plan may write is compiled, and each mistake is told; `mistakes_of_routes.txt`
has what is said.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.programs import get_refusal
from helpers.unary_ops import make_call
from scalec.compiler.emit import emit
from scalec.compiler.frontend.expert_rules import ROW_BY_ROW
from scalec.compiler.ops import OPS
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.tools.formatter import format_plan

Golden = Callable[[str, str], None]

ROUTE = "route y to experts by top(y @ router[hidden -> experts], 2)"
BODY = "y = silu(y @ e_up[hidden -> expert_ffn]) @ e_down[expert_ffn -> hidden]"
PLAN = f"""\
op halved(x[.., f]) -> [.., f] over .., f from "my_ops:halved"
op summed(x[.., seq, f]) -> [.., seq, f] over .., f from "my_ops:summed"
model tiny(tokens[batch, seq], labels[batch, seq]) {{
  dims {{
    vocab = 64  hidden = 32  heads = 4  head_dim = 8  experts = 8  expert_ffn = 16  both = 2 * expert_ffn  layers = 2
  }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    y = rmsnorm(x, norm[hidden], 1e-5)
    {ROUTE} {{
      {BODY}
    }}
    x = x + y
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
mesh  {{ dp = 2  tp = 2 }}
shard {{ experts over dp  batch over dp  vocab over tp  seq over tp }}
train {{
  seq = 16  global_batch = 8  microbatch = 2  steps = 30
  optimizer adamw {{ lr = 1e-3 }}
  data text {{ files = [python_stdlib] }}
}}
"""

AROUND = {  # what is written instead of what, outside of the body
    ROUTE: (
        # the value and the dim
        "route z to experts by top(y @ router[hidden -> experts], 2)",
        "route tokens to experts by top(y @ router[hidden -> experts], 2)",
        "route x to experts by top(x @ router[hidden -> experts], 2)",
        "route y to expert by top(y @ router[hidden -> experts], 2)",
        "route y to batch by top(y @ router[hidden -> experts], 2)",
        "route y to layers by top(y @ router[hidden -> experts], 2)",
        # the choice
        "route y to experts by softmax(y @ router[hidden -> experts])",
        "route y to experts by top(y @ router[hidden -> experts])",
        "route y to experts by top(y @ router[hidden -> experts], 9)",
        "route y to experts by top(y @ router[hidden -> experts], 1.5)",
        "route y to experts by top(y @ router[hidden -> experts], 2, groups=3)",
        "route y to experts by top(y @ router[hidden -> experts], 2, groups=8)",
        "route y to experts by top(y @ router[hidden -> experts], 2, groups=4, from=5)",
        "route y to experts by top(y @ router[hidden -> experts], 2, score=tanh)",
        "route y to experts by top(y @ router[hidden -> experts], 2, normalize=on)",
        "route y to experts by top(y @ router[hidden -> experts], 2, balance=-1)",
        # biases
        "route y to experts by top(y @ router[hidden -> experts], 2, bias=b[experts])",
        "route y to experts by top(y @ router[hidden -> experts], 2, rate=0.1)",
        "route y to experts by top(y @ router[hidden -> experts], 2, bias=b[experts], rate=-0.1)",
        "route y to experts by top(y @ router[hidden -> experts], 2, bias=b[hidden], rate=0.1)",
        "route y to experts by top(y @ router[hidden -> experts], 2, bias=norm, rate=0.1)",
        "route y to experts by top(y @ router[hidden -> experts], 2, bias=router[experts],"
        " rate=0.1)",
        "route y to experts by top(y @ router[hidden -> experts], 2, bias=b[experts],"
        " bias=c[experts], rate=0.1)",
        # logits
        "route y to experts by top(y @ router[hidden -> vocab], 2)",
        "route y to experts by top(router[experts], 2)",
        f"l = y @ router[hidden -> experts]  {ROUTE.replace('y @ router[hidden -> experts]', 'l')}",
        # syntax
        "route y to experts",
        "route y by top(y @ router[hidden -> experts], 2)",
        "route y, x to experts by top(y @ router[hidden -> experts], 2)",
        "route y to 8 by top(y @ router[hidden -> experts], 2)",
        "route y to experts by top",
    ),
    "x = x + y\n": (
        # parameters of experts elsewhere
        "x = x + y @ e_down\n",
        "x = x + y + b[experts, hidden]\n",
        f"{ROUTE.replace('router', 'other').replace('2)', '3)')} {{ y = -y }} x = x + y\n",
        "route y to heads by top(y @ other[hidden -> heads], 2) { y = silu(y @ e_up) @ e_down"
        " }  x = x + y\n",
        "y = moe(y, num_experts=8, top_k=2)  x = x + y\n",
    ),
    "over dp  batch over dp  vocab over tp  seq over tp": (
        # sharding
        "over dp  batch over dp  vocab, expert_ffn over tp  seq over tp",
        "over dp, tp  batch over dp  vocab over tp",
        "over dp  batch over dp  vocab over tp  chosen over tp",
    ),
    "steps = 30": ("steps = 30  compile = on", "steps = 30  experts = padded"),
}
INSIDE = (
    # values of all tokens
    "y = y + x",
    "y = y + embedding(tokens, e_in[vocab, hidden])",
    # dims
    "y = y @ e_up[hidden -> expert_ffn]",
    "y = y @ e_up[hidden -> experts]",
    "y = y @ e_up[hidden -> chosen]",
    # parameters
    "y = y @ wte",
    "y = y - b[hidden]",
    "y = y + b[expert_ffn]",
    "y = b[hidden] + y",
    "y = (y @ e_up[hidden -> heads, head_dim] + b[head_dim]) @ e_down[heads, head_dim -> hidden]",
    "y = y * silu(g[hidden])",
    "y = y @ -e_up[hidden -> expert_ffn] @ e_down[expert_ffn -> hidden]",
    "y = y @ y",
    "y = y + x[hidden]",
    # ops
    "y = rmsnorm(y, norm2[hidden], 1e-5)",
    "y = attention(y, y, y, mask=causal)",
    "y = summed(y)",
    # nothing for the route
    "z = silu(y)",
    # syntax
    "repeat layers { y = silu(y) }",
    "if i < 2 { y = silu(y) }",
    f"{ROUTE} {{ y = silu(y) }}",
)

FINE = (
    *(f"y = {make_call(name, 'y')}" for name in sorted({*ROW_BY_ROW} - {"concat", "split"})),
    "y = gelu(y)",
    "y = softcap(leaky_relu(y, 0.1), 30)",
    "g, u = split(y @ e_up[hidden -> both], [expert_ffn, expert_ffn])  y = silu(g) * u @"
    " e_down[expert_ffn -> hidden]",
    "z = y @ e_up[hidden -> expert_ffn]  y = concat(z, z, as=both) @ e_down[both -> hidden]",
    "y = y @ e_up[hidden -> heads, head_dim] @ e_down[heads, head_dim -> hidden]",
    "y = y + b[hidden]",
    "y = (silu(y @ e_up[hidden -> heads, head_dim] + b[heads, head_dim])) @ e_down[heads,"
    " head_dim -> hidden]",
    "y = 1 - 2 * y / (1 + exp(-y))",
    "t = -y  y = t + y / 2",
    "y = halved(y)",
)


REFUSED = [
    *(PLAN.replace(old, new) for old, each in AROUND.items() for new in each),
    *(PLAN.replace(BODY, body) for body in INSIDE),
]


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> None:
    """Works in a folder with the functions of the user ops."""
    (working_folder / "my_ops.py").write_text(
        "def halved(x):\n    return x / 2\n\n\ndef summed(x):\n    return x\n"
    )


def get_message(text: str) -> str:
    assert text != PLAN
    return str(get_refusal(text, "plan.scale"))


def test_mistakes(golden: Golden) -> None:
    golden("mistakes_of_routes.txt", "".join(f"{get_message(text)}\n\n\n" for text in REFUSED))


@pytest.mark.sample(9)
@pytest.mark.parametrize("body", FINE)
def test_what_experts_can_compute(body: str) -> None:
    source = Source("plan.scale", PLAN.replace(BODY, body))
    model = compile_plan(source, "resolve")
    program = lower(model)
    emit(program, source, model, verify(program, model))


@pytest.mark.parametrize(
    "name", sorted({name for name, op in OPS.items() if op.user_visible} - {*ROW_BY_ROW})
)
def test_experts_have_no_other_ops(name: str) -> None:
    assert f"error[E0220]: experts have no `{name}`" in get_message(
        PLAN.replace(BODY, f"y = {name}(y)")
    )


def test_values_and_parameters_of_a_body_leave_names_free() -> None:
    """A parameter may have the name of a value that ended before, and of one that the compiler
    makes.
    """
    body = "t = silu(y @ e_up[hidden -> expert_ffn])  y = t @ order[expert_ffn -> hidden]"
    after = "x = x + y + x @ t[hidden -> both] @ gates[both -> hidden]\n"
    program = compile_plan(
        Source("plan.scale", PLAN.replace(BODY, body).replace("x = x + y\n", after))
    )
    assert {"t", "order", "gates"} <= {param.name for param in program.params}


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "repeat blocks {{ {} }}",
        "repeat blocks as i {{ if i < 1 {{ x = -x }} else {{ {} }} }}",
    ],
)
def test_where_routes_may_be(around: str) -> None:
    begin, end = (
        PLAN.index("  repeat layers {") + len("  repeat layers {"),
        PLAN.index("  }\n  loss"),
    )
    text = PLAN.replace("layers = 2", "layers = 2  blocks = 2")
    text = text.replace(f"repeat layers {{{PLAN[begin:end]}  }}", around.format(PLAN[begin:end]))
    assert ("repeat layers" in text) == (around == "repeat layers")
    assert compile_plan(Source("plan.scale", text)).choices == {"experts": "chosen"}


@pytest.mark.parametrize("given", ["2, balance=0.01", "2, softmax, off, 1, 1, 1, 0, 0.01"])
def test_a_loss_may_be_given_by_its_place(given: str) -> None:
    plan = PLAN.replace("[hidden -> experts], 2)", f"[hidden -> experts], {given})")
    program = compile_plan(Source("tiny.scale", plan), "resolve")
    (balance,) = (op for op in program.ops if op.kind == "balance")
    assert balance.get("by") == 0.01 / 8
    assert program.losses == 2


def aux_plan(settings: str, microbatch: int = 2) -> str:
    """The plan with a loss over all layers."""
    plan = PLAN.replace("[hidden -> experts], 2)", f"[hidden -> experts], 2, {settings})")
    return re.sub(r"microbatch = \d+", f"microbatch = {microbatch}", plan)


def two_routes(first: str, second: str) -> str:
    """The plan with two routes in each layer, whose losses have these settings."""
    plan = aux_plan(first)
    begin, end = plan.index("    route "), plan.index("  }\n  loss")
    again = re.sub(r"\b(\w+)(?=\[)", r"\1_2", plan[begin:end]).replace(first, second)
    return plan[:end] + again + plan[end:]


def test_a_loss_over_all_layers_is_of_groups_of_sequences() -> None:
    program = compile_plan(Source("tiny.scale", aux_plan("aux_loss=0.5, aux_batch=2")), "resolve")
    (loss,) = (op for op in program.ops if op.kind == "aux_loss")
    assert loss.get("by") == 0.5 * 2 / program.train.global_batch
    assert loss.get("rows") == 2 * program.train.seq * program.size("layers")
    assert (loss.get("sequences"), program.losses) == (2, 2)


def test_a_loss_over_all_layers_with_a_factor_of_zero_is_none() -> None:
    program = compile_plan(Source("tiny.scale", aux_plan("aux_loss=0")))
    assert program.losses == 1
    assert not any(op.kind in ("aux_loss", "sum_scores") for op in program.ops)


def test_a_loss_over_more_sequences_than_a_microbatch_has() -> None:
    with pytest.raises(
        PlanError, match="over 4 sequences does not fit a microbatch of 2"
    ) as caught:
        compile_plan(Source("tiny.scale", aux_plan("aux_loss=0.5, aux_batch=4")))
    # ops of the plan lack their file
    (found,) = (each for each in caught.value.diagnostics if each.code != "E0101")
    assert found.code == "E0310"
    assert "write `microbatch = 4` or a multiple" in found.help


def test_a_mistake_in_logits_leaves_the_dims_of_later_parameters() -> None:
    scored = ROUTE.replace("2)", "2, score=other)")
    later = "    x = x + y\n    z = x @ later[hidden -> experts]\n"
    text = PLAN.replace(ROUTE, scored).replace("    x = x + y\n", later)
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", text))
    codes = {mistake.code for mistake in caught.value.diagnostics}
    assert codes - {"E0101"} == {"E0608", "E0220"}  # ops of the plan may lack their file


def test_routes_to_the_same_experts_have_one_loss() -> None:
    """Of both, if they say the same of it."""
    program = compile_plan(
        Source("tiny.scale", two_routes("aux_loss=0.5", "aux_loss=0.5")), "resolve"
    )
    (loss,) = (op for op in program.ops if op.kind == "aux_loss")
    assert loss.get("rows") == 2 * program.train.seq * program.size("layers")
    with pytest.raises(
        PlanError, match="two routes to `experts` have different `aux_loss` or `aux_batch`"
    ):
        compile_plan(Source("tiny.scale", two_routes("aux_loss=0.5", "aux_loss=0.25")))


@pytest.mark.parametrize("groups", [3, 6])
def test_experts_in_groups_of_any_number_are_proved(groups: int) -> None:
    route = ROUTE.replace("2)", f"2, score=sigmoid, groups={groups}, from=2)")
    plan = PLAN.replace(ROUTE, route).replace("experts = 8", "experts = 12")
    model = compile_plan(Source("plan.scale", plan), "resolve")
    verify(lower(model), model)


@pytest.mark.parametrize(
    ("mesh", "nodes", "is_wide"),
    [("dp = 4  tp = 1", 2, True), ("dp = 2  tp = 2", 2, False), ("dp = 4  tp = 2", 4, True)],
)
def test_only_experts_that_no_machine_can_hold_leave_it(
    mesh: str, nodes: int, is_wide: bool
) -> None:
    plan = (
        PLAN.replace("dp = 2  tp = 2", mesh) + f"cluster {{ gpus_per_node = 2  nodes = {nodes} }}\n"
    )
    if is_wide:
        compile_plan(Source("plan.scale", plan))
    else:
        assert (
            "error[E0511]: axis `dp` spans several nodes: 4 ranks, but 2 GPUs per node"
            in get_message(plan)
        )


def test_routes_are_laid_out() -> None:
    laid_out = format_plan(
        Source("plan.scale", PLAN.replace("\n", " ").replace('halved" ', 'halved"\n'))
    )
    assert f"    {ROUTE} {{\n      {BODY}\n    }}\n    x = x + y\n" in laid_out
    assert format_plan(Source("plan.scale", laid_out)) == laid_out
