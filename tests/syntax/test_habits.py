"""Plans written as in other languages: each message, letter for letter, is in
tests/golden/habits.txt.
"""

import re
from collections import defaultdict
from collections.abc import Callable

import pytest

from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.habits import HABITS
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source

STATEMENTS = (
    "x = silu x",
    "x = tanh(silu x)",
    "x = a + silu x @ w[hidden -> ffn]",
    "x = x.T @ w[hidden -> ffn]",
    "x = x @ wte.T",
    "x = x.transpose(1, 2)",
    "x = x.view(batch, seq, heads, head_dim)",
    "x = x.shape",
    "x = x.relu()",
    "x = x.data",
    "x = F.relu(x)",
    "x = torch.nn.functional.silu(x)",
    "x = nn.Linear(hidden, ffn)(x)",
    "x = Linear(hidden, ffn, bias=no)(x)",
    "x = nn.Embedding(vocab, hidden)(tokens)",
    "x = self.w1(x)",
    "x = x[:, 0]",
    "x = x[..., 0]",
    "x = x[-1]",
    "x = x ** 2",
    "x = x^2",
    "x = x // 2",
    "x = a // the residual",
    "// the residual",
    "-- the residual",
    "/* the residual */",
    '"""The residual."""',
    "'''The residual.'''",
    "for i in layers { x = a }",
    "for _ in range(layers) { x = a }",
    "for i in range(0, layers):\n    x = a",
    "for layer in self.layers:\n    x = layer(x)",
    "repeat layers:\n    x = a",
    "repeat layers as i {\n    if i < 2: x = a\n  }",
    "repeat layers as i {\n    if i < 2 { x = a } else: x = b\n  }",
    "repeat layers as i {\n    if i < 2 { x = a } elif i < 3 { x = b }\n  }",
    "return x",
    "return cross_entropy(x, labels)",
    "@torch.compile\n  x = a",
    "x = lambda y: y",
    "x += a",
    "x := a",
    "x == a",
    "x <- a",
    "x: Tensor = a",
    "let y = a",
    "(g, u) = split(x, [ffn, ffn])",
    "x, y = a, b",
    "x + a",
    "silu(x)",
    "print(x)",
    "x = a × b",
    "x = a ÷ b",
    "x = a − b",
    "x = a | b",
    "x =\u00a0a",
    "x = a +\\\n    b",
    "x = a @ w(hidden -> ffn)",
    "x = a @ w[hidden => ffn]",
    "x = a @ w[hidden → ffn]",
    "x = a @ w[ffn <- hidden]",
    "x = embedding(tokens, wte[vocab, hidden,])",
    "x = rmsnorm(a, w[hidden], .00001)",
    "x = a * 2.",
    "init = normal(0.02)",
    "init w, b = zeros",
    "init: normal(0.02)",
    "init { std = 0.02 }",
    "w ~ zeros",
    "const theta = 10000",
    "dims = { hidden = 64 }",
    "dims: { hidden = 64 }",
    "dims(hidden = 64)",
    "Repeat layers as i { x = a }",
)
TEXTS = (
    "import torch\nimport torch.nn as nn\n\nmodel m(t[b]) { x = a }",
    "from torch import nn\nmodel m(t[b]) { x = a }",
    'include "models/llama.scale"',
    "use models/llama.scale",
    "def llama(tokens, labels):\n    x = a\n",
    "class Llama(nn.Module):\n    def forward(self, x):\n        return x\n",
    "class Llama {\n  init ~ zeros\n}",
    "model llama {\n  x = a\n}",
    "model llama() {\n  x = a\n}",
    "model llama(tokens: Tensor, labels: Tensor) {\n  x = a\n}",
    "model llama(tokens[batch, seq], labels[batch, seq]):\n  x = a\n",
    "model llama(tokens[batch, seq], labels[batch, seq],) {\n  x = a\n}",
    "Model llama(tokens[batch, seq]) { x = a }",
    "mesh = { dp = 2 }",
    "mesh(dp = 2)",
    "train { seq: 8192 }",
    'train { "seq": 8192 }',
    "train { optimizer = adamw { lr = 1e-3 } }",
    "train { optimizer adamw(lr = 1e-3) }",
    "train { data text { files = [corpus.txt] } }",
    "train { data text { files = [/data/c4-*.txt] } }",
    "train { data text { files = [“corpus.txt”] } }",
    "train { data text { files = ['corpus.txt'] } }",
    "train { data text { files = [`corpus.txt] } }",
    "shard { batch -> dp }",
    "shard { batch: dp }",
    "shard { batch on dp }",
    "state { optimizer across dp }",
    "shard { batch over (dp, tp) }",
    "shard { batch over [dp, tp]  seq over tp }",
    "shard { batch over dp x tp  seq over tp }",
    "shard { batch over dp and tp }",
    "shard { heads, ffn, over tp }",
)


def plan(statement: str) -> str:
    """A statement in a model of others."""
    return f"model m(t[b]) {{\n  b = a\n  {statement}\n  loss = b\n}}\n"


def get_first_diagnostic(text: str) -> Diagnostic:
    """The first mistake of a text."""
    with pytest.raises(PlanError) as error:
        parse_plan(Source("m.scale", text))
    return error.value.diagnostics[0]


@pytest.fixture(scope="module")
def messages() -> list[Diagnostic]:
    """What is said of all texts."""
    return [get_first_diagnostic(text) for text in (*map(plan, STATEMENTS), *TEXTS)]


def test_the_messages(messages: list[Diagnostic], golden: Callable[[str, str], None]) -> None:
    golden("habits.txt", "\n\n".join(map(str, messages)) + "\n")


def filled(template: str) -> str:
    """A pattern for what a message or a help says."""
    return re.escape(template.format_map(defaultdict(lambda: "\0"))).replace("\0", ".*")


def test_every_habit_is_told(messages: list[Diagnostic]) -> None:
    said = "\n".join(f"{each.message}\t{each.help}" for each in messages)
    forms = [f"{filled(habit.message)}\t{filled(habit.help)}" for habit in HABITS]
    assert [form for form in forms if not re.search(f"^{form}$", said, re.MULTILINE)] == []


def test_brackets_are_told_where_no_habit_is_before_them() -> None:
    found = get_first_diagnostic(
        "model m(t[b]) {\n  x = silu(a @ w[hidden -> ffn]\n  y = tanh(x)\n}\n"
    )
    assert (found.code, found.message) == ("E0103", "expected `)`, found `}`")


def test_words_in_comments_and_other_lines_are_no_habits() -> None:
    text = "model m(t[b]) {\n  x = a # for i in layers:\n  # return x\n  y = * b\n}\n"
    assert get_first_diagnostic(text).message == "expected a value, found `*`"
