"""Formatting: ugly plans and what becomes of them; of random ones, that words, comments and
meaning stay.
"""

import random
import sys
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source
from scalec.testing.random_plans import drafts
from scalec.tools.formatter import format_plan
from scalec.tools.formatter.breaks import line_starts
from scalec.tools.formatter.words import arrange, split_words

PLANS = Path(__file__).parents[3] / "plans"

GOLDEN = {
    "nothing": (" \n\n", ""),
    "spaces": (
        'use"models/llama.scale"{dims{hidden=64 heads=-4*( 2+1 )}}',
        'use "models/llama.scale" { dims { hidden = 64  heads = -4 * (2 + 1) } }\n',
    ),
    "user ops": (
        'op f(x[..,d],linear w[ d ],eps)->[ ..,d ]over ..from"own:f"op g(x[a , b])->[a,b] over'
        ' a , b from "own:g"',
        'op f(x[.., d], linear w[d], eps) -> [.., d] over .. from "own:f"'
        '  op g(x[a, b]) -> [a, b] over a, b from "own:g"\n',
    ),
    "a bracket of the author's lines that a long line closes": (
        "model m(t[a]) { x = f(g(\na), " + "some + " * 20 + "b) }",
        "model m(t[a]) {\n  x = f(\n    g(\n      a\n    ),\n    some\n"
        + "    + some\n" * 19
        + "    + b\n  )\n}\n",
    ),
    "a model": (
        "model m ( tokens [batch,seq],labels[ batch , seq ] ) {init~normal( 0.02 ) init a,b~zeros\n"
        "q,k=f(x@wq[hidden->heads,dim],eps = 1e-5) x=[]\n"
        "repeat layers{x=- x-1}}",
        """model m(tokens[batch, seq], labels[batch, seq]) {
  init ~ normal(0.02)  init a, b ~ zeros
  q, k = f(x @ wq[hidden -> heads, dim], eps=1e-5)  x = []
  repeat layers { x = -x - 1 }
}
""",
    ),
    "branches": (
        """model m(t[b]) {
repeat layers as i{
if i<dense+1{a,b=f(x) y = a}   # one
else{y=x
z = 3}
if i < 2 {
 x = 1 } # why
 # not
 else {
   x = 2 }
 if i < 3 { x = 1 }
 else { x = 2 }
 if i < 2 { short = 1
 longer_name = 2 } else {
 short = 1
 longer_name = 2 } } }
op f(x[..,d])->[..,d],[ d ]over .. from "a:b"deterministic
""",
        """model m(t[b]) {
  repeat layers as i {
    if i < dense + 1 { a, b = f(x)  y = a } # one
    else {
      y = x
      z = 3
    }
    if i < 2 {
      x = 1
    } # why
    # not
    else {
      x = 2
    }
    if i < 3 { x = 1 } else { x = 2 }
    if i < 2 {
      short = 1
      longer_name = 2
    } else {
      short = 1
      longer_name = 2
    }
  }
}
op f(x[.., d]) -> [.., d], [d] over .. from "a:b" deterministic
""",
    ),
    "blank lines": (
        "\n\na {\n\n\nb = 1\n\n\n\nc = 2\n\n}\n\n\nd {\n\n}\n\n",
        "a {\n  b = 1\n\n  c = 2\n}\n\nd {}\n",
    ),
    "columns": (
        """cluster { gpu = h100 }
mesh { dp = 2 }
shard {
  vocab, heads over tp
  # between
  seq over tp
}
model m(tokens[batch, seq]) {
  dims {
    kv_heads = 8
    heads = 32 a = 1

    ffn = 4
    hidden = [
      1 ]
  }
  dims { ffn = 4 }
  const { eps = 1 }
  scores = a
  x = b
}
""",
        """cluster { gpu = h100 }
mesh    { dp = 2 }
shard {
  vocab, heads over tp
  # between
  seq          over tp
}
model m(tokens[batch, seq]) {
  dims {
    kv_heads = 8
    heads = 32  a = 1

    ffn    = 4
    hidden = [
      1
    ]
  }
  dims  { ffn = 4 }
  const { eps = 1 }
  scores = a
  x = b
}
""",
    ),
    "comments": (
        """#first
a{ # behind a brace
# above
b=1  # behind
    # before the end
}# closed
c { # in empty braces
}
d { e = f( # behind a bracket
g, # between arguments
h
# last
) i = [ # in a list
] j = # in a setting
  # above its value
  1 }
# end""",
        """#first
a { # behind a brace
  # above
  b = 1 # behind
  # before the end
} # closed
c { # in empty braces
}
d {
  e = f( # behind a bracket
    g, # between arguments
    h
    # last
  )  i = [ # in a list
  ]  j = # in a setting
    # above its value
    1
}
# end
""",
    ),
    "a comment after `as`": (
        "model m(t[seq]) { repeat a as # b\ni {} }",
        "model m(t[seq]) {\n  repeat a as # b\n    i {}\n}\n",
    ),
    "columns of rules": (
        """shard {
  batch over dp
  seq over ring as zigzag via ring # one
  heads, kv_heads over tp
  seq over uly via ulysses
  seq over long_axis as contiguous
}
""",
        """shard {
  batch           over dp
  seq             over ring      as zigzag via ring # one
  heads, kv_heads over tp
  seq             over uly                 via ulysses
  seq             over long_axis as contiguous
}
""",
    ),
    "aligned comments": (
        """mesh { dp=2 tp=2 }      # one

shard {                 # two
  batch over dp
  sequence over tp     # three
}
a { b = 1  # four
           # five
c = 2 }
""",
        """mesh { dp = 2  tp = 2 } # one

shard {                 # two
  batch    over dp
  sequence over tp # three
}
a {
  b = 1 # four
        # five
  c = 2
}
""",
    ),
    "lines of the author's": (
        """a
{
  b
  = c +
  d
    * f(x,
  y)
  + g([1,
    2])
  vocab,
  heads over
  tp
}
""",
        """a {
  b = c +
    d
    * f(
      x,
      y
    )
    + g([
      1,
      2
    ])
  vocab,
    heads over tp
}
""",
    ),
    "a section too long": (
        f"train {{ {' '.join(f'setting_{n} = {n}' for n in range(8))} optimizer adamw {{ lr ="
        f" 1 }} }}",
        "train {\n"
        + "".join(f"  setting_{n} = {n}\n" for n in range(8))
        + "  optimizer adamw { lr = 1 }\n}\n",
    ),
    "a statement too long": (
        "model m(t[a]) { loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ head[hidden ->"
        " vocab], "
        "labels, ignored_label=-100, smoothing=0.125)\n"
        f"x = x + (silu(m @ {'w' * 30}[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @"
        f" {'v' * 30}[ffn -> hidden]\n"
        f"y = f({'a' * 50}, g({'b' * 50}), {'c' * 50}) }}",
        f"""model m(t[a]) {{
  loss = cross_entropy(
    rmsnorm(x, norm[hidden], eps) @ head[hidden -> vocab], labels, ignored_label=-100, smoothing=0.125
  )
  x = x
    + (silu(m @ {"w" * 30}[hidden -> ffn]) * (m @ w_up[hidden -> ffn]))
    @ {"v" * 30}[ffn -> hidden]
  y = f(
    {"a" * 50},
    g({"b" * 50}),
    {"c" * 50}
  )
}}
""",
    ),
    "columns that would be too long": (
        f"a {{\n  {'b' * 60} = 1\n  c = {'d' * 80}\n}}\n",
        f"a {{\n  {'b' * 60} = 1\n  c = {'d' * 80}\n}}\n",
    ),
    "numbers of steps": (
        "watch{copies   every 100  replay=5 every every 2}\nwatch{copies every 100 #x\nreplay"
        " every\n7\nskips=2 }",
        "watch { copies every 100  replay = 5  every every 2 }\n"
        "watch {\n  copies every 100 #x\n  replay every 7\n  skips = 2\n}\n",
    ),
    "line ends of other systems": ("a {\r\n\tb = 1 # c \r\n}\r\n", "a {\n  b = 1 # c\n}\n"),
}


def formatted(text: str) -> str:
    """The text, formatted, which formatting again leaves as it is."""
    once = format_plan(Source("plan.scale", text))
    assert format_plan(Source("plan.scale", once)) == once
    return once


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: str) -> None:
    ugly, fine = GOLDEN[case]
    assert formatted(ugly) == fine
    assert formatted(fine) == fine


@pytest.mark.parametrize(
    "path", sorted(PLANS.rglob("*.scale")), ids=lambda path: str(path.relative_to(PLANS))
)
def test_the_plans_of_scalec_are_formatted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text


@given(drafts(), st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_words_comments_and_meaning_stay(plan: str, chance: random.Random) -> None:
    ugly = _scattered(plan, chance)
    fine = formatted(ugly)
    assert parse_plan(Source("plan.scale", fine)) == parse_plan(Source("plan.scale", ugly))
    assert _comments(fine) == _comments(ugly)
    assert not [line for line in fine.splitlines() if line != line.rstrip()]


@given(drafts(), st.randoms(use_true_random=False))
@settings(max_examples=8)
def test_lines_are_divided_until_they_fit(plan: str, chance: random.Random) -> None:
    words = [word.text for word in split_words(plan)]
    spaces = [chance.choice([" ", " ", "\n"] if chance.random() < 0.1 else [" "]) for _ in words]
    fine = formatted("".join(word + space for word, space in zip(words, spaces, strict=True)))
    assert max(map(len, fine.splitlines())) <= 120


def _scattered(plan: str, chance: random.Random) -> str:
    """A plan's words, with any white space and comments between them."""
    spaces = [
        "  ",
        " \t",
        "\n",
        "\n   ",
        "\n\n\n",
        "\r\n",
        " # a  \n",
        "\n#b\n",
        "\n    # c = {\n\n",
    ]
    rare = chance.choice([0.02, 0.3, 1.0])
    parts = [
        word.text + (chance.choice(spaces) if chance.random() < rare else " ")
        for word in split_words(plan)
    ]
    return "".join(parts)


def _comments(text: str) -> list[str]:
    return [word.text for word in split_words(text) if word.is_comment]


DEEP, BACK = "f(" * 50, " + b * c, d)" * 50
COSTLY = {
    "a deep line before many lines": f"x = {DEEP}a{BACK}\n" + "y = a\n" * 500,
    "many deep lines": f"x = {DEEP}a{BACK}\n" * 10,
    "a long sum of deep terms": "x = " + " + ".join([f"{DEEP}a{BACK}"] * 10),
    "a long list in deep brackets": f"x = {DEEP}{', '.join(['a'] * 500)}{')' * 50}",
    "lines whose brackets are divided one by one": f"x = {DEEP}" + "a,\n" * 500 + f"a{BACK}",
    "deep blocks on one line": "repeat layers { " * 50 + "x = a " * 500 + "}" * 50,
}


@pytest.mark.parametrize("case", COSTLY)
def test_the_cost_is_bounded_for_each_word(case: str) -> None:
    """In function calls; a fixed number for each word, however deep it stands."""
    text = f"model m(t[a]) {{\n{COSTLY[case]}\n}}\n"
    assert _calls(text) <= 150 * len(split_words(text))


def _calls(text: str) -> int:
    """How many functions of Python are called to lay a text out."""
    count = 0

    def seen(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    plan = arrange(split_words(text))
    sys.setprofile(seen)
    try:
        line_starts(plan)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("mesh { dp = }", "E0104"),
        ("mesh { dp = 2", "E0103"),
        ("mesh { dp = 2 }\nprogram tiny after resolve\n", "E0190"),
        ("m {}" * 16000, "E0102"),
    ],
    ids=["syntax", "brackets", "IR text", "too long when laid out"],
)
def test_refused(text: str, code: str) -> None:
    with pytest.raises(PlanError) as caught:
        format_plan(Source("plan.scale", text))
    assert [each.code for each in caught.value.diagnostics] == [code]
