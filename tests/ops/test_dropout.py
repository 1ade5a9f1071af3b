"""Dropout in the language and the IR: what is written, what the compiler adds, and what is
refused.
"""

import pytest

from helpers.plan_table import PLANS
from helpers.programs import get_refusal, make_program
from helpers.small_plans import LLAMA, START, Plan
from scalec.compiler.analysis.verifier import check
from scalec.compiler.emit.readback import check as read_back
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import Op, Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.source import Source

TEXT = PLANS["dropout"].text()
TAIL = "loss = cross_entropy(x @ head[hidden -> vocab], labels)"


def of(body: str) -> str:
    """A plan of these statements."""
    return Plan(f"{START} {body} {TAIL}").text()


def drops(program: Program) -> list[Op]:
    return [op for op in program.ops if "site" in dict(op.attrs)]


def get_headline(text: str) -> str:
    """The first line of what is wrong with a plan."""
    return str(get_refusal(text)).split("\n")[0]


def test_a_share_of_zero_leaves_no_trace() -> None:
    without = TEXT.replace("dropout=0.2", "dropout=0").replace("0.1)", "0)")
    never = TEXT.replace(", dropout=0.2", "").replace("x = dropout(x, 0.1)", "")
    never = never.replace("dropout(m @ w_up[hidden -> ffn], 0.1)", "(m @ w_up[hidden -> ffn])")
    assert "dropout" not in never
    assert print_ir(make_program(without, until="fuse_buckets")) == print_ir(
        make_program(never, until="fuse_buckets")
    )


def test_each_dropout_is_told_from_the_others_and_backward_is_told_which_it_is() -> None:
    assert [op.get("site") for op in drops(make_program(TEXT, "resolve"))] == [1, 2, 3]
    assert [(dict(op.attrs).get("of", op.kind), op.get("site")) for op in drops(make_program(TEXT, until="fuse_buckets"))] == [
        ("dropout", 1), ("attention", 2), ("dropout", 3), ("dropout", 3), ("attention", 2), ("dropout", 1)
    ]  # fmt: skip


def test_every_repeat_forks_the_draws_of_what_is_around_it() -> None:
    inner = "repeat layers { x = dropout(x, 0.1)  x = x * dropout(x, 0.1) }"
    model = make_program(
        of(f"repeat blocks {{ {inner}  x = x + dropout(x, 0.1) }} x = x + dropout(x, 0.1)"),
        "resolve",
    )
    assert [(op.inputs, op.outputs[0].name) for op in _forks(model)] == [
        (("draws",), "blocks_draws"), (("draws.1",), "layers_draws"),
    ]  # fmt: skip
    assert [op.inputs[1] for op in drops(model)] == ["draws.2", "draws.2", "draws.1", "draws"]
    assert [arg.value.name for arg in model.region.args] == ["tokens", "labels", "draws"]


def _forks(program: Program) -> list[Op]:
    return [op for op in program.ops if op.kind == "fork"]


def test_a_model_that_drops_nothing_draws_nothing() -> None:
    program = make_program(Plan().text(), until="fuse_buckets")
    assert not _forks(program)
    assert [arg.value.name for arg in program.region.args] == ["tokens.1", "labels.1"]


def test_names_of_the_plan_may_be_those_that_the_compiler_gives() -> None:
    repeat = "repeat layers { draws = draws * dropout(layers_draws, 0.1) }"
    text = of(f"draws = x * 2  layers_draws = draws + x  {repeat}  x = draws")
    program = make_program(text, until="fuse_buckets")
    assert read_ir(Source("tiny.ir", print_ir(program))) == program
    read_back(train_py(program, Source("tiny.scale", text)), program)


def test_repeats_that_turn_as_often_are_read_back_whatever_their_names() -> None:
    """They are given the same draws, and other sites."""
    body = "repeat layers { x = x + dropout(x, 0.1) }  repeat blocks { x = x * dropout(x, 0.1) }"
    text = of(f"{body}  {body}")
    program = make_program(text, until="fuse_buckets")
    assert [op.get("repeat") for op in _forks(program)] == ["layers", "blocks"] * 2
    read_back(train_py(program, Source("tiny.scale", text)), program)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = dropout(x, 1)", "error[E0610]: a fraction is at least 0 and less than 1"),
        ("x = dropout(x, -0.1)", "error[E0610]: a fraction is at least 0 and less than 1"),
        ("x = dropout(x)", "error[E0606]: `dropout` needs an argument `p`"),
        ("x = dropout(x, tokens, 0.1)", "error[E0606]: `dropout` takes fewer arguments"),
        ("x = dropout(x, 0.1, site=3)", "error[E0606]: `dropout` has no argument `site`"),
        ("x = dropout(x, 0.1, draws=tokens)", "error[E0606]: `dropout` has no argument `draws`"),
        ("x = dropout(tokens, 0.1)", "error[E0607]: `dropout` takes numbers here"),
        (
            "x = x * dropout(w[hidden], 0.1)",
            "error[E0307]: dropout draws for each sample, of which [hidden] knows nothing",
        ),
        (
            "y = mean(x, over=seq) @ w[hidden -> ffn, seq]  x = x * sum(sum(dropout(y, 0.1),"
            " over=seq), over=ffn)",
            "error[E0307]: dropout takes [batch, seq, …], not [batch, ffn, seq]",
        ),
    ],
)
def test_what_cannot_be_dropped_is_said(body: str, message: str) -> None:
    assert get_headline(of(body)) == message


def test_attention_that_drops_takes_a_share() -> None:
    body = LLAMA.replace("mask=causal", "mask=causal, dropout=1")
    assert (
        get_headline(Plan(body).text()) == "error[E0610]: a fraction is at least 0 and less than 1"
    )


def test_draws_have_the_dim_of_a_repeat_that_is_cut() -> None:
    """The outer one; the inner one is not for cutting, though it is a dim of draws too."""
    body = "repeat blocks { repeat layers { x = x + dropout(x, 0.1) } }"
    plan = Plan(
        f"{START} {body} {TAIL}", "dp = 2  pp = 2", "batch over dp  blocks over pp", ranks=2
    )
    program = make_program(plan.text(), until="fuse_buckets")
    assert program.pipeline
    assert not [
        dim for type in program.types.values() for dim in type.dims if type.axes_of(dim) == ("pp",)
    ]
    text = plan.text().replace("blocks over pp", "layers over pp")
    assert get_headline(text) == "error[E0513]: `layers` is the dim of another repeat"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dropout(x, draws) <p=0.1, site=1>", "dropout(x, draws) <p=1.5, site=1>"),
        ("dropout(x, draws) <p=0.1, site=1>", "dropout(x, draws) <p=0.1, site=0>"),
        ("dropout(x, draws) <p=0.1, site=1>", "dropout(x, tokens) <p=0.1, site=1>"),
        ("attention(q, k, v, draws.1) <", "attention(q, k, v) <"),
        (", dropout=0.2, site=2>", ">"),
    ],
)
def test_ir_that_cannot_be_is_refused(old: str, new: str) -> None:
    text = print_ir(make_program(TEXT, "resolve"))
    assert old in text
    with pytest.raises(AssertionError):
        check(read_ir(Source("tiny.ir", text.replace(old, new, 1))))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch=1, split={0: self.tp}", "batch=1"),
        ("batch=1, split={0: self.tp}", "batch=1, split={2: self.tp}"),
        ("batch=1, split={2: self.tp}", "batch=0, split={2: self.tp}"),
        ("p=0.1, site=1", "p=0.2, site=1"),
        ("p=0.1, site=1", "p=0.1, site=2"),
        (", heads=self.tp)", ")"),
        ("draws=draws, heads", "heads"),
        ("dropout=0.2, ", ""),
        ("fork(draws, LAYERS)", "fork(draws, 3)"),
        ("zip(self.layers, layers_draws,", "zip(self.layers, draws,"),
        ("zip(self.layers, layers_draws, strict=True)", "zip(self.layers, layers_draws)"),
        (
            "for layer, draws in zip(self.layers, layers_draws, strict=True)",
            "for layer in self.layers",
        ),
        ("model(tokens, labels, draws)", "model(tokens, labels, None)"),
        ("model(tokens, labels, None)", "model(tokens, labels, _)"),
        ("for tokens, labels, draws in", "for draws, labels, tokens in"),
        ('"draws": Input(("batch",), {"batch": ("dp",)})', '"draws": Input(("batch",), {})'),
    ],
)
def test_a_program_that_drops_otherwise_is_not_the_ir(old: str, new: str) -> None:
    program = make_program(TEXT, until="fuse_buckets")
    text = train_py(program, Source("tiny.scale", TEXT))
    read_back(text, program)
    assert old in text
    with pytest.raises(AssertionError):
        read_back(text.replace(old, new, 1), program)
