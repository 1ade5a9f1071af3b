"""docs/language.md: each block is compiled and proved, or gives the error that is quoted; tables
are those of the code.

`pytest tests/frontend/test_language.py --update-golden` writes tables and quoted errors anew.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import attrs
import pytest

from helpers.unary_ops import UNARY, goes_over_one, make_call
from scalec.compiler.cli.compile import compile_source
from scalec.compiler.cli.op_trials import Trials
from scalec.compiler.config.fields import Field, Part, fields_of, heading_of
from scalec.compiler.config.settings import (
    Cluster,
    Data,
    DataSet,
    Flow,
    Optimizer,
    Order,
    ParamGroup,
    Pipelining,
    Schedule,
    Settings,
    Train,
    Watch,
)
from scalec.compiler.emit import emit
from scalec.compiler.frontend.arguments import signature
from scalec.compiler.frontend.route_call import CALL
from scalec.compiler.ir import Op, Program
from scalec.compiler.ops import OPS, Attribute, OpDef
from scalec.compiler.ops.protocol import ALL
from scalec.compiler.proof import verify
from scalec.compiler.syntax.codes import get_codes
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source, Span
from scalec.compiler.syntax.tree import Call, Name, Negative, Number
from scalec.compiler.tuning.lowering import compile_plan, lower

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")


# ---- blocks


class Block(NamedTuple):
    """A block of plan text, and the error that is quoted behind it, None where it is not marked
    as wrong.
    """

    text: str
    error: str | None


BLOCK = re.compile(r"(<!-- wrong -->\n)?```scale\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def blocks() -> Iterator[Block]:
    """All blocks of the document, in its order."""
    for wrong, text, error in BLOCK.findall(DOCUMENT):
        yield Block(text, error if wrong else None)


BLOCKS = list(blocks())
PLAN = BLOCKS[0].text

SECTIONS = {  # what completes a block of sections that lacks them
    "model": PLAN[PLAN.index("model") : PLAN.index("mesh")],
    "mesh": "mesh { dp = 2 }\nshard { batch over dp }\n",
    "train": PLAN[PLAN.index("train") :],
}
MODEL = {  # what stands before statements that lack it, on one line
    "model": "model m(tokens[batch, seq], labels[batch, seq]) {",
    r"dims +\{": (
        "dims { vocab = 256  hidden = 64  heads = 4  kv_heads = 2  head_dim = 16  ffn = 192 "
        " layers = 2 }"
    ),
    r"const +\{": "const { eps = 1e-5  theta = 10000 }",
    "init ~": "init ~ normal(0.02)",
    "embedding": "x = embedding(tokens, wte[vocab, hidden])",
}
LOSS = "loss = cross_entropy(x @ head[hidden -> vocab], labels)\n"
STATEMENTS = re.compile(r"(dims|const|init|repeat|[\w, ]+ =) ?")


def completed(block: str) -> str:
    """The plan that a block is part of: a whole one as it stands."""
    if block.startswith("use"):
        return block
    if STATEMENTS.match(block):
        head = " ".join(line for word, line in MODEL.items() if not re.search(word, block))
        block = f"{head}\n{block}{'' if 'loss =' in block else LOSS}}}\n"
    return block + "".join(
        text for kind, text in SECTIONS.items() if not re.search(rf"^{kind}\b", block, re.MULTILINE)
    )


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> None:
    """Works in a folder with what blocks name: the plans of scalec, and the files in the
    document.
    """
    shutil.copytree(ROOT / "plans", working_folder, dirs_exist_ok=True)
    for name, text in re.findall(
        r"```(?:python\n# (?=\w+\.py)|csv )(\w+\.\w+)\n(.*?)```", DOCUMENT, re.DOTALL
    ):
        (working_folder / name).write_text(text, encoding="utf-8")


def get_message(block: str) -> str:
    """What scalec says of a block that is wrong."""
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", completed(block)))
    return f"{caught.value}\n"


@pytest.mark.parametrize(
    "block", [b.text for b in BLOCKS if b.error is None], ids=lambda text: text.split("\n")[0][:40]
)
def test_every_block_is_compiled_and_proved(block: str) -> None:
    source = Source("plan.scale", completed(block))
    model = compile_plan(source, "resolve")
    program = lower(model)
    emit(program, source, model, verify(program, model))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "block", [b.text for b in BLOCKS if b.error is None and b.text.startswith("op ")]
)
def test_the_functions_are_as_their_ops_say(block: str) -> None:
    trials, plan = Trials("", None), compile_source(Source("plan.scale", completed(block)))
    functions = trials.try_functions(plan.model, plan.source)
    trials.end()
    assert functions.tried
    assert not functions.untried


# ---- the table of ops

OPERATORS = {
    "contract": "x @ w",
    "add": "x + y",
    "mul": "x * y",
    "div": "x / y",
    "scale": "x * 2",
    "shift": "x + 2",
}
"""Ops that a plan writes as operators."""

HEADS = (
    "q[hidden -> heads, head_dim], x @ k[hidden -> kv_heads, head_dim], x @ v[hidden ->"
    " kv_heads, head_dim]"
)
WHOLE = {  # a use of each op that needs dims whole, these dims, and how the table calls them
    "attention": (
        f"attention(x @ {HEADS}, mask=causal)",
        "head_dim",
        "the last; keys and values: `seq`",
    ),
    "concat": (
        "concat(x @ a[hidden -> ffn], x @ b[hidden -> ffn], as=both)",
        "ffn both",
        "all that are joined",
    ),
    "cross_entropy": ("cross_entropy(x @ a[hidden -> ffn], labels)", "ffn", "classes"),
    "layernorm": ("layernorm(x, a[hidden], eps)", "hidden", "the weight's"),
    "rmsnorm": ("rmsnorm(x, a[hidden], eps)", "hidden", "the weight's"),
    "rope": ("rope(x @ a[hidden -> heads, head_dim], theta)", "head_dim", "the last"),
    "split": (
        "y, z = split(x @ a[hidden -> both], [ffn, ffn])",
        "ffn both",
        "all that are taken apart",
    ),
    **{name: (make_call(name, "x"), "hidden", "`over`") for name in UNARY if goes_over_one(name)},
}


def in_program(statement: str, kind: str) -> tuple[Program, Op]:
    """A plan with the statement, and its first op of a kind."""
    dims = MODEL[r"dims +\{"].replace("}", " both = 2 * ffn }")
    program = compile_plan(
        Source(
            "plan.scale",
            completed(f"{dims}\n{statement if ' = ' in statement else f'y = {statement}'}\n"),
        ),
        "resolve",
    )
    return program, next(op for op in program.ops if op.kind == kind)


@pytest.mark.parametrize("kind", WHOLE)
def test_the_dims_that_an_op_needs_whole(kind: str) -> None:
    statement, dims, _ = WHOLE[kind]
    program, op = in_program(statement, kind)
    of = program.types
    assert OPS[kind].unsharded_dims([of[name] for name in op.inputs], op) == {*dims.split()}


def ops_table() -> Iterator[str]:
    """A row for each op of the language, operators first."""
    yield from heading("written", "computes", "whole", "linear in")
    visible = sorted(name for name, entry in OPS.items() if entry.user_visible)
    for name in (*OPERATORS, *visible):
        entry = OPS[name]
        doc = " ".join([*entry.doc.split(), *(choices(a) for a in entry.attributes if a.choices)])
        yield row(f"`{OPERATORS.get(name) or signature(entry)}`", doc, whole(entry), linear(entry))


def choices(attribute: Attribute) -> str:
    return (
        f"{attribute.name.capitalize()}:"
        f" {' or '.join(f'`{choice}`' for choice in attribute.choices)}."
    )


def whole(entry: OpDef) -> str:
    words = WHOLE[entry.name][2] if entry.name in WHOLE else ""
    return f"{words}, *sums*" if entry.expand else words


def linear(entry: OpDef) -> str:
    if entry.linear == ((ALL,),):
        return "all together"
    return ", ".join(entry.operands[i].name for group in entry.linear for i in group)


def test_whole_names_every_op_that_needs_dims_whole() -> None:
    default = attrs.fields_dict(OpDef)["unsharded_dims"].default
    assert {
        name
        for name, entry in OPS.items()
        if entry.user_visible and entry.unsharded_dims is not default
    } == {*WHOLE}


# ---- the table of a router's arguments

ROUTER = {  # what an argument takes, and what it means
    "logits": ("`[batch, seq, experts]`", "a number of each token for each expert"),
    "bias": (
        "`[experts]`",
        "added to scores to choose by, never to gates (Wang et al. 2024); `rate` comes with it",
    ),
    "k": ("a whole number", "how many experts a token has"),
    "rate": (
        "a number",
        "by how much a step moves biases: up where an expert had less than the mean load, down"
        " where more",
    ),
    "score": (
        "`softmax`, `sigmoid`",
        "of all of a token's logits, or of each by itself: the scores that choose experts",
    ),
    "normalise": (
        "`off`, `on`",
        "whether a token's gates, the scores of its experts, are divided by their sum",
    ),
    "scale": ("a number", "factor of the gates"),
    "groups": ("a whole number", "experts in equal groups; experts are chosen from some of them"),
    "from": (
        "a whole number",
        "how many: the groups with the largest sums of their two best (DeepSeek-AI 2024)",
    ),
    "capacity": (
        "a number",
        "at most ⌈capacity · seq · k / experts⌉ tokens of a sequence to an expert, the first"
        " ones; 0 is no limit",
    ),
    "balance": (
        "a number",
        "factor of a loss of each sequence, Σ f·P: the share of its choices that an expert"
        " has, times experts, and the "
        "expert's mean share of scores (DeepSeek-AI 2024)",
    ),
    "aux_loss": (
        "a number",
        "factor of transformers' load-balancing loss, experts · Σ f·P, over the tokens of"
        " `aux_batch` sequences in all "
        "layers together: f is how many of these chose the expert, divided by their number,"
        " and P the mean of their "
        "scores (Fedus et al. 2021)",
    ),
    "aux_batch": (
        "a whole number",
        "over how many sequences `aux_loss` is; the loss is the mean over such groups",
    ),
    "z": ("a number", "factor of the mean over tokens of (log Σ exp(logits))² (Zoph et al. 2022)"),
}


def route_table() -> Iterator[str]:
    """A row for each argument of `top`."""
    yield from heading("argument of `top`", "takes", "default", "meaning")
    for each in CALL.operands:
        yield row(
            f"`{each.name}`",
            ROUTER[each.name][0],
            "none" if each.optional else "needed",
            ROUTER[each.name][1],
        )
    for each in CALL.attributes:
        if each.name == "rate":
            yield row("`bias`", ROUTER["bias"][0], "none", ROUTER["bias"][1])
        if not each.implied:
            kept = f"{each.default:g}" if isinstance(each.default, float) else each.default
            of = "needed" if kept is None else "none" if each.name == "rate" else f"`{kept}`"
            yield row(f"`{each.name}`", ROUTER[each.name][0], of, ROUTER[each.name][1])


# ---- the tables of settings and codes


def settings_table(cls: type[Settings]) -> Iterator[str]:
    """A row for each setting of a section."""
    yield from heading("setting", "takes", "default", "meaning")
    for field in fields_of(cls):
        only = f" ({', '.join(field.variants)} only)" if field.variants else ""
        yield row(f"`{field.key}`{only}", takes(field), default(cls, field), meaning(field))


def takes(field: Field) -> str:
    """What the reader of a setting says that it takes, and of which range."""
    if isinstance(field.what, Part):
        return "a name or a call" if field.what.form == "call" else f"`{field.what.example}`"
    nowhere = Source("", "").whole()
    call, minus_one = (
        Call(Name("f", nowhere), (), (), nowhere),
        Negative(Number(1, "", nowhere), nowhere),
    )
    wrong_type = re.search(r"takes (.*), not a call", refusal(field, call, nowhere))
    assert wrong_type
    range = re.search(r"must be (.*)$", refusal(field, minus_one, nowhere).split("\n")[0])
    after = ", after `every`" if field.every else ""
    return (f"{wrong_type[1]}, {range[1]}" if range else wrong_type[1]) + after


def refusal(field: Field, value: Call | Negative, span: Span) -> str:
    assert not isinstance(field.what, Part)
    with pytest.raises(PlanError) as caught:
        field.what.get_value(Name(field.key, span), value)
    return str(caught.value)


def default(cls: type[Settings], field: Field) -> str:
    if isinstance(field.what, Part):
        name, heading = heading_of(field.what.section_class)
        kept = attrs.fields_dict(cls)[field.name].default
        return (
            "needed"
            if field.required
            else f"`{getattr(kept, name)}`"
            if kept and heading
            else "none"
        )
    kept = attrs.fields_dict(cls)[field.name].default
    return "needed" if field.required else "none" if kept is None else f"`{field.what.show(kept)}`"


def meaning(field: Field) -> str:
    return field.doc or "below"


MISSING = {  # what a plan cannot say yet, and how one would try
    "Inputs besides tokens, labels and documents": (
        "model m(tokens[batch, seq], image[batch, seq]) { loss = cross_entropy(tokens, labels) }"
    ),
    "Tokenizers other than bytes": SECTIONS["train"].replace(
        "[python_stdlib]", "[python_stdlib]  tokenizer = bpe"
    ),
}


def missing_table() -> Iterator[str]:
    """A row for each thing that is missing, with the first line of what scalec says of it."""
    yield from heading("what", "what scalec says of it")
    for what, block in MISSING.items():
        yield row(what, get_message(f"{block}\n").split("\n")[0].removeprefix("error"))


def codes_table() -> Iterator[str]:
    """A row for each code."""
    yield from heading("code", "stands for")
    yield from (row(code, entry.title) for code, entry in get_codes().items())


def heading(*cells: str) -> Iterator[str]:
    yield row(*cells)
    yield "|---" * len(cells) + "|"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {
    "ops": ops_table,
    "route": route_table,
    "missing": missing_table,
    "codes": codes_table,
    **{
        cls.SECTION: lambda cls=cls: settings_table(cls)
        for cls in (
            Cluster,
            Train,
            Optimizer,
            Schedule,
            ParamGroup,
            Data,
            DataSet,
            Flow,
            Pipelining,
            Watch,
        )
    },
    "order": lambda: settings_table(Order),  # its section, too, is a schedule
}


def test_tables_and_quoted_errors_are_those_of_the_code(golden: Callable[[str, str], None]) -> None:
    def quoted(found: re.Match[str]) -> str:
        return (
            f"{found[1]}```scale\n{found[2]}```\n\n```text\n{get_message(found[2])}```\n"
            if found[1]
            else found[0]
        )

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], *TABLES[found[2]](), ""])

    text = re.sub(r"(<!-- table: (\w+) -->)\n(?:\|.*\n)*", table, BLOCK.sub(quoted, DOCUMENT))
    golden("../../docs/language.md", text)
