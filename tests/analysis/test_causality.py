"""Models whose losses see what they must predict are refused at the op that lets it in; others are
not.

Both opinions are asked of each model: the flow along the sequence, and values of the model whose
hidden tokens are replaced.  They share no code but the list of the model's inputs.
"""

from importlib import import_module
from pathlib import Path

import pytest
from attrs import evolve, frozen

from helpers.small_plans import ATTENTION, DIMS, HEAD, LLAMA, MLP, PARALLEL_BLOCK, START, Plan
from scalec.compiler.analysis.causality import claim
from scalec.compiler.frontend.causality import check_causality
from scalec.compiler.ir import Program
from scalec.compiler.ops import OPS
from scalec.compiler.ops.reach import Reach
from scalec.compiler.proof import verify
from scalec.compiler.proof.causality import depends_on_hidden_tokens
from scalec.compiler.proof.inputs import scene
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.small_sizes import resize, small
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

FULL = LLAMA.replace("mask=causal", "mask=full")
SEEN = LLAMA.replace("mask=causal", "mask=causal, documents=documents")
OWN_OPS = """def pooled(x):
    return x.cumsum(1).flip(1)

def doubled(x):
    return 2 * x

def scanned(x):
    return x.cumsum(-2)
"""
EXPERTS = f"""{START}
  repeat layers {{ {ATTENTION}
    m = rmsnorm(x, norm2[hidden], eps)
    route m to experts by top(ROUTER, 2, balance=0.1 LIMIT) {{
      m = silu(m @ e_in[hidden -> ffn]) @ e_out[ffn -> hidden]
    }}
    x = x + m
  }}
  {HEAD}"""
WITH_EXPERTS = f"{DIMS}  experts = 4"
ROUTER = "m @ router[hidden -> experts]"


def after_attention(statement: str) -> str:
    """The model with a statement in each layer."""
    return f"{START} repeat layers {{ {ATTENTION} {statement} {MLP} }} {HEAD}"


def with_documents(body: str, dims: str = DIMS) -> Plan:
    """A plan whose model knows the documents of tokens."""
    return Plan(body, inputs=", documents[batch, seq]", data="separator = 10", dims=dims)


def masked(body: str) -> Plan:
    """A plan that predicts hidden tokens."""
    dims = DIMS.replace("vocab = 12", "vocab = 256")
    return Plan(body, word="bidirectional", data="masked = 15%  mask_token = 0", dims=dims)


def mixed(first: str, others: str) -> str:
    """The model with one way to attend in the first layer and another in the others."""
    attention = "attention(q, k, v, mask=causal)"
    assert attention in LLAMA
    layers = LLAMA.replace("repeat layers {", "repeat layers as i {")
    branches = (
        f"if i < 1 {{ o = attention(q, k, v, {first}) }} else {{ o = attention(q, k, v,"
        f" {others}) }}"
    )
    return layers.replace(f"x = x + {attention}", f"{branches}  x = x + o")


def routed(router: str = ROUTER, limit: str = "") -> str:
    """The model with experts."""
    return EXPERTS.replace("ROUTER", router).replace("LIMIT", limit)


@frozen
class Case:
    """A plan, the text of it that lets hidden tokens in, and ops of its own."""

    plan: Plan
    refused_at: tuple[str, ...] = ()
    ops: str = ""


LEAKS = {
    "no mask": Case(Plan(FULL), ("attention(q, k, v, mask=full)",)),
    "a window that looks ahead": Case(
        Plan(LLAMA.replace("mask=causal", "mask=full, window=2")),
        ("attention(q, k, v, mask=full, window=2)",),
    ),
    "one layer without a mask": Case(
        Plan(mixed("mask=causal", "mask=full")),
        ("attention(q, k, v, mask=full)",),
    ),
    "later keys": Case(
        Plan(LLAMA.replace("attention(q, k,", "attention(q, roll(k, -1, over=seq),")),
        ("roll(k, -1, over=seq)",),
    ),
    "roll back": Case(
        Plan(after_attention("x = x + roll(x, -1, over=seq)")), ("roll(x, -1, over=seq)",)
    ),
    "roll on": Case(
        Plan(after_attention("x = x + roll(x, 1, over=seq)")), ("roll(x, 1, over=seq)",)
    ),
    "roll of a long sequence": Case(
        Plan(after_attention("x = x + roll(x, 4096, over=seq)"), seq=8192),
        ("roll(x, 4096, over=seq)",),
    ),
    "there and too far back": Case(
        Plan(after_attention("x = x + roll(roll(x, 1, over=seq), -2, over=seq)")),
        ("roll(roll(x, 1, over=seq), -2, over=seq)", "roll(x, 1, over=seq)"),
    ),
    "pooling": Case(Plan(after_attention("x = x + mean(x, over=seq)")), ("mean(x, over=seq)",)),
    "what is left of a sum": Case(
        Plan(after_attention("x = x * 0.5 + sum(x, over=seq) * -0.5")), ("sum(x, over=seq)",)
    ),
    "softmax over the sequence": Case(
        Plan(after_attention("x = x * softmax(x, over=seq)")), ("softmax(x, over=seq)",)
    ),
    "a norm over the sequence": Case(
        Plan(after_attention("x = x + rmsnorm(x, norm3[seq, hidden], eps)")),
        ("rmsnorm(x, norm3[seq, hidden], eps)",),
    ),
    "a mixer": Case(
        Plan(
            after_attention("x = x + mean(x, over=hidden) @ mix[seq -> ffn] @ back[ffn -> hidden]")
        ),
        ("mean(x, over=hidden) @ mix[seq -> ffn]",),
    ),
    "an own op": Case(
        Plan(after_attention("x = x + pooled(x)")),
        ("pooled(x)",),
        "op pooled(x[batch, seq, hidden]) -> [batch, seq, hidden] over batch, hidden from"
        ' "own:pooled"\n',
    ),
    "two tokens ahead": Case(
        Plan(
            LLAMA.replace(
                HEAD,
                f"y = roll(x, 1, over=seq) {HEAD} + cross_entropy(rmsnorm(y, norm, eps) @"
                " head, labels)",
            )
        ),
        ("roll(x, 1, over=seq)",),
    ),
    "experts by later tokens": Case(
        Plan(routed(f"({ROUTER}) + mean(m, over=[seq, hidden])"), dims=WITH_EXPERTS),
        ("mean(m, over=[seq, hidden])",),
    ),
    "documents left out": Case(
        with_documents(mixed("mask=causal, documents=documents", "mask=causal")),
        ("attention(q, k, v, mask=causal)",),
    ),
}

SOUND = {
    "llama": Case(Plan()),
    "a parallel block": Case(Plan(PARALLEL_BLOCK)),
    "a window": Case(Plan(LLAMA.replace("mask=causal", "mask=causal, window=2"))),
    "a window of one": Case(Plan(LLAMA.replace("mask=causal", "mask=full, window=1"))),
    "there and back": Case(
        Plan(after_attention("x = x + roll(roll(x, 1, over=seq), -1, over=seq)"))
    ),
    "once around": Case(Plan(after_attention("x = x + roll(x, 4, over=seq)"))),
    "roll of features": Case(Plan(after_attention("x = x + roll(x, 1, over=hidden)"))),
    "mean of features": Case(Plan(after_attention("x = x + mean(x * x, over=hidden)"))),
    "softmax over features": Case(Plan(after_attention("x = x * softmax(x, over=hidden)"))),
    "positions": Case(Plan(LLAMA.replace(START, f"{START} x = x + wpe[seq, hidden]"))),
    "dropout": Case(Plan(after_attention("x = dropout(x, 0.1)"))),
    "documents": Case(with_documents(SEEN)),
    "experts": Case(Plan(routed(), dims=WITH_EXPERTS)),
    "experts of a capacity": Case(Plan(routed(limit=", capacity=1.5"), dims=WITH_EXPERTS)),
    "experts of a capacity, documents": Case(
        with_documents(
            routed(limit=", capacity=1.5").replace(
                "mask=causal", "mask=causal, documents=documents"
            ),
            WITH_EXPERTS,
        )
    ),
    "an own op": Case(
        Plan(after_attention("x = x + doubled(x)")),
        ops='op doubled(x[.., hidden]) -> [.., hidden] over .., hidden from "own:doubled"\n',
    ),
    "an own op that looks back": Case(
        Plan(after_attention("x = x + scanned(x)")),
        ops='op scanned(x[.., s, d]) -> [.., s, d] over .., d causal s from "own:scanned"\n',
    ),
    "two heads": Case(Plan(LLAMA.replace(HEAD, f"{HEAD} + cross_entropy(x @ head, labels)"))),
}

PURPOSES = {
    "masked tokens": Case(masked(FULL)),
    "masked tokens, pooled": Case(masked(after_attention("x = x + mean(x, over=seq)"))),
    "masked tokens, documents": Case(
        evolve(
            masked(FULL.replace("mask=full", "mask=full, documents=documents")),
            inputs=", documents[batch, seq]",
            data="masked = 15%  mask_token = 0  separator = 10",
        )
    ),
}


def checked(case: Case, folder: Path) -> Program:
    """The model, whose mistakes are refused."""
    (folder / "own.py").write_text(OWN_OPS)
    return compile_plan(Source(str(folder / "tiny.scale"), case.ops + case.plan.text()), "validate")


def unchecked(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The model, whatever its losses see."""
    validate = import_module("scalec.compiler.frontend.validate")
    checks = tuple(check for check in validate.CHECKS if check is not check_causality)
    monkeypatch.setattr(validate, "CHECKS", checks)
    return checked(case, folder)


def depends(program: Program) -> bool:
    """What values of a small model say."""
    axes = {axis.name: 1 for axis in program.axes}
    model = resize(program, axes, small(program, axes))
    numbers = Field(2, len(model.axes))
    return depends_on_hidden_tokens(model, scene(model, numbers), numbers)


@pytest.mark.parametrize("name", LEAKS)
def test_a_loss_that_sees_hidden_tokens_is_refused_where_they_enter(
    name: str, tmp_path: Path
) -> None:
    case = LEAKS[name]
    with pytest.raises(PlanError) as refused:
        checked(case, tmp_path)
    assert {mistake.code for mistake in refused.value.diagnostics} == {"E0224"}
    places = [mistake.span for mistake in refused.value.diagnostics]
    assert [
        place.text.splitlines()[place.line - 1][place.column - 1 : place.end_column - 1]
        for place in places
    ] == [*case.refused_at]


@pytest.mark.parametrize("name", LEAKS)
def test_values_of_such_a_model_depend_on_hidden_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = LEAKS[name]
    if case.plan.seq > 100:
        case = evolve(case, plan=evolve(case.plan, body=case.plan.body.replace("4096", "1")))
    assert depends(unchecked(case, tmp_path, monkeypatch))


@pytest.mark.parametrize("name", [*SOUND, *PURPOSES])
def test_other_losses_see_nothing_hidden(name: str, tmp_path: Path) -> None:
    program = checked((SOUND | PURPOSES)[name], tmp_path)
    assert not depends(program)
    assert bool(program.sees) == (name in PURPOSES) == ("as the model says" in claim(program))


@pytest.mark.parametrize(
    ("name", "word", "statement"),
    [
        ("no mask", "bidirectional", "a loss may depend on a later token, as the model says"),
        ("pooling", "bidirectional", "a loss may depend on a later token, as the model says"),
        ("roll on", "bidirectional", "a loss may depend on a later token, as the model says"),
        (
            "documents left out",
            "cross_document",
            "no loss depends on a later token; a loss may depend on another document, as the"
            " model says",
        ),
    ],
)
def test_a_word_allows_it(name: str, word: str, statement: str, tmp_path: Path) -> None:
    program = checked(evolve(LEAKS[name], plan=evolve(LEAKS[name].plan, word=word)), tmp_path)
    assert not depends(program)
    assert claim(program) == statement


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("documents left out", "bidirectional", "other documents"),
        ("no mask", "cross_document", "later tokens"),
    ],
)
def test_the_other_word_does_not(name: str, word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        checked(evolve(LEAKS[name], plan=evolve(LEAKS[name].plan, word=word)), tmp_path)


def test_all_ops_that_let_tokens_in_are_named_at_once(tmp_path: Path) -> None:
    body = FULL.replace(
        "x = x + (silu", "x = x + roll(x, -1, over=seq) + mean(x, over=seq) x = x + (silu"
    )
    with pytest.raises(PlanError) as refused:
        checked(Case(Plan(body)), tmp_path)
    assert [mistake.message.rpartition(" by ")[2] for mistake in refused.value.diagnostics] == [
        "`attention`",
        "`roll`",
        "`mean`",
    ]


@pytest.mark.parametrize(
    ("kind", "name"), [("attention", "no mask"), ("roll", "roll on"), ("mean", "pooling")]
)
def test_an_entry_that_hides_what_its_op_sees_is_found_by_values(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its_own_token = dict.fromkeys(range(3), Reach())
    monkeypatch.setitem(
        OPS, kind, evolve(OPS[kind], reach=lambda types, op: its_own_token, permutes=None)
    )
    model = checked(LEAKS[name], tmp_path)
    monkeypatch.undo()
    with pytest.raises(PlanError, match="a loss depends on a later token"):
        verify(lower(model), model)


def test_the_certificate_says_what_losses_depend_on(tmp_path: Path) -> None:
    cases = SOUND["llama"], SOUND["documents"], SOUND["experts of a capacity, documents"]
    shared = "; documents of a sequence share the capacity of experts"
    assert [claim(checked(case, tmp_path)) for case in cases] == [
        "no loss depends on a later token",
        "no loss depends on a later token or on another document",
        f"no loss depends on a later token or on another document{shared}",
    ]
