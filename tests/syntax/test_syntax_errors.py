"""Messages on text that is no plan, letter for letter."""

import gzip
import re
from inspect import cleandoc
from pathlib import Path

import pytest

from scalec.compiler.analysis.hardware.files import load as load_hardware
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source

MISTAKES = {
    "parameter_not_closed": (
        "model m(t[b]) {\n  x = f(a, w[hidden -> heads)\n}\n",
        """
        error[E0103]: expected `]`, found `)`
         --> m.scale:2:29
          |
        2 |   x = f(a, w[hidden -> heads)
          |                             ^
          |             - to close this `[`
        """,
    ),
    "block_not_closed": (
        "model m(t[b]) {\n  repeat layers {\n    x = a\n}\n",
        """
        error[E0103]: this `{` is never closed
         --> m.scale:1:15
          |
        1 | model m(t[b]) {
          |               ^
        2 |   repeat layers {
          |                 - perhaps it is this one
        ...
        4 | }
          | - which closes here, by indentation not its own
        """,
    ),
    "closed_twice": (
        "mesh { dp = 2 } }",
        """
        error[E0103]: `}` closes nothing
         --> m.scale:1:17
          |
        1 | mesh { dp = 2 } }
          |                 ^
        """,
    ),
    "arrow": (
        "model m(t[b]) {\n  x = w[hidden > heads]\n}\n",
        """
        error[E0104]: this is not an arrow
         --> m.scale:2:16
          |
        2 |   x = w[hidden > heads]
          |                ^
          |
          = help: write `->`, as in `w[hidden -> ffn]`
        """,
    ),
    "number_as_dim": (
        "model m(t[b]) { x = w[4096 -> heads] }",
        """
        error[E0104]: expected a name, found `4096`
         --> m.scale:1:23
          |
        1 | model m(t[b]) { x = w[4096 -> heads] }
          |                       ^^^^
          |
          = help: dims go by name, with sizes in `dims { … }`; tensors have no index
        """,
    ),
    "operand_missing": (
        "model m(t[b]) {\n  x = a +\n}\n",
        """
        error[E0104]: expected a value, found `}`
         --> m.scale:3:1
          |
        3 | }
          | ^
        """,
    ),
    "init_without_tilde": (
        "model m(t[b]) { init normal(0.02) }",
        """
        error[E0104]: expected `~` or `,`, found `(`
         --> m.scale:1:28
          |
        1 | model m(t[b]) { init normal(0.02) }
          |                            ^
          |
          = help: as in `init ~ normal(0.02)` or `init wo, w_down ~ normal(0.01)`
        """,
    ),
    "rule_without_over": (
        "shard { batch dp }",
        """
        error[E0104]: expected `{`, found `}`
         --> m.scale:1:18
          |
        1 | shard { batch dp }
          |                  ^
          |
          = help: a rule is written `batch over dp`, a section `batch dp { … }`
        """,
    ),
    "rule_without_axis": (
        "shard { batch over }",
        """
        error[E0104]: expected a name, found `}`
         --> m.scale:1:20
          |
        1 | shard { batch over }
          |                    ^
        """,
    ),
    "stage_without_over": (
        "state { zero 1 dp }",
        """
        error[E0104]: expected `over`, found `dp`
         --> m.scale:1:16
          |
        1 | state { zero 1 dp }
          |                ^^
          |
          = help: a stage of ZeRO, from 0 to 3, is written `zero 1 over dp`
        """,
    ),
    "stage_as_a_call": (
        "state { zero(1) over dp }",
        """
        error[E0104]: expected a name, `over`, `=` or `,`, found `(`
         --> m.scale:1:13
          |
        1 | state { zero(1) over dp }
          |             ^
          |
          = help: a stage of ZeRO, from 0 to 3, is written `zero 1 over dp`
        """,
    ),
    "padded_by_a_name": (
        "model m(t[b]) { dims { vocab = 50257 pad by } }",
        """
        error[E0104]: expected a number, found `by`
         --> m.scale:1:42
          |
        1 | model m(t[b]) { dims { vocab = 50257 pad by } }
          |                                          ^^
        """,
    ),
    "rule_outside": (
        "batch over dp",
        """
        error[E0104]: expected a name or `{`, found `over`
         --> m.scale:1:7
          |
        1 | batch over dp
          |       ^^^^
          |
          = help: rules belong in a section: `shard { batch over dp }`
        """,
    ),
    "colon": (
        "train { seq: 8192 }",
        """
        error[E0104]: a setting is written with `=`
         --> m.scale:1:12
          |
        1 | train { seq: 8192 }
          |            ^
          |
          = help: write `seq = 8192`
        """,
    ),
    "no_equal_sign": (
        "train { seq 8192 }",
        """
        error[E0104]: expected a name, `over`, `=` or `,`, found `8192`
         --> m.scale:1:13
          |
        1 | train { seq 8192 }
          |             ^^^^
          |
          = help: a setting is written `seq = 8192`
        """,
    ),
    "value_forgotten": (
        "train {\n  seq =\n  steps = 10\n}\n",
        """
        error[E0104]: expected a value, found `steps =`
         --> m.scale:2:7
          |
        2 |   seq =
          |       ^
        3 |   steps = 10
          |   ----- found here
        """,
    ),
    "comma": (
        "train { seq = 1, steps = 2 }",
        """
        error[E0104]: expected a name or `}`, found `,`
         --> m.scale:1:16
          |
        1 | train { seq = 1, steps = 2 }
          |                ^
          |
          = help: entries are separated by spaces or line ends
        """,
    ),
    "no_braces": (
        "mesh = 3",
        """
        error[E0104]: expected a name or `{`, found `=`
         --> m.scale:1:6
          |
        1 | mesh = 3
          |      ^
          |
          = help: a section is expected here: `mesh { … }`
        """,
    ),
    "use_without_quotes": (
        "use llama.scale",
        """
        error[E0104]: a file's name has quotes
         --> m.scale:1:5
          |
        1 | use llama.scale
          |     ^^^^^^^^^^^
          |
          = help: write `"llama.scale"`
        """,
    ),
    "file_ends": (
        "mesh { dp = 2 }\ntrain # and then?\n",
        """
        error[E0104]: expected a name or `{`, found the end of the file
         --> m.scale:2:1
          |
        2 | train # and then?
          | ^^^^^ after this
        """,
    ),
    "string_not_closed": (
        'data { files = ["abc ] }',
        """
        error[E0105]: this string does not end
         --> m.scale:1:17
          |
        1 | data { files = ["abc ] }
          |                 ^^^^^^^^
          |
          = help: a string is on one line, between `"` and `"`
        """,
    ),
    "slashes": (
        "// plan",
        """
        error[E0104]: this is not a comment
         --> m.scale:1:1
          |
        1 | // plan
          | ^^
          |
          = help: comments begin with `#`
        """,
    ),
    "branch_of_another_comparison": (
        "model m(t[b]) {\n  repeat layers as i { if i >= 2 { x = a } }\n}\n",
        """
        error[E0104]: expected `<`, found `>`
         --> m.scale:2:29
          |
        2 |   repeat layers as i { if i >= 2 { x = a } }
          |                             ^
          |
          = help: a branch is written `if i < 2 { … } else { … }`, where `i` is the index of `repeat layers as i { … }`
        """,
    ),
    "branch_at_most": (
        "model m(t[b]) {\n  repeat layers as i { if i <= 2 { x = a } }\n}\n",
        """
        error[E0104]: expected a value, found `=`
         --> m.scale:2:30
          |
        2 |   repeat layers as i { if i <= 2 { x = a } }
          |                              ^
          |
          = help: a branch is written `if i < 2 { … } else { … }`, where `i` is the index of `repeat layers as i { … }`
        """,
    ),
    "branch_of_two_conditions": (
        "model m(t[b]) {\n  repeat layers as i { if i < 2 and i > 0 { x = a } }\n}\n",
        """
        error[E0104]: expected `{`, found `and`
         --> m.scale:2:33
          |
        2 |   repeat layers as i { if i < 2 and i > 0 { x = a } }
          |                                 ^^^
          |
          = help: a branch is written `if i < 2 { … } else { … }`, where `i` is the index of `repeat layers as i { … }`
        """,
    ),
    "else_if": (
        "model m(t[b]) {\n  repeat layers as i { if i < 2 { x = a } else if i < 3 { x = b } }\n}\n",
        """
        error[E0104]: a branch has one `else`
         --> m.scale:2:43
          |
        2 |   repeat layers as i { if i < 2 { x = a } else if i < 3 { x = b } }
          |                                           ^^^^^^^
          |
          = help: put a branch inside the other one into its braces: `else { if … { … } }`
        """,
    ),
    "else_alone": (
        "model m(t[b]) {\n  repeat layers { else { x = a } }\n}\n",
        """
        error[E0104]: expected `=` or `,`, found `{`
         --> m.scale:2:24
          |
        2 |   repeat layers { else { x = a } }
          |                        ^
          |
          = help: `else` comes after the `}` of its `if`; write `else if` as `else { if … { … } }`
        """,
    ),
    "index_without_as": (
        "model m(t[b]) {\n  repeat layers i { x = a }\n}\n",
        """
        error[E0104]: expected `as` or `{`, found `i`
         --> m.scale:2:17
          |
        2 |   repeat layers i { x = a }
          |                 ^
          |
          = help: a repeat is written `repeat layers { … }`, or `repeat layers as i { … }`
        """,
    ),
    "as_misplaced": (
        "model m(t[b]) {\n  repeat as i layers { x = a }\n}\n",
        """
        error[E0104]: expected `as` or `{`, found `i`
         --> m.scale:2:13
          |
        2 |   repeat as i layers { x = a }
          |             ^
          |
          = help: a repeat is written `repeat layers { … }`, or `repeat layers as i { … }`
        """,
    ),
}


@pytest.mark.parametrize(("text", "told"), MISTAKES.values(), ids=MISTAKES)
def test_says(text: str, told: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(Source("m.scale", text))
    assert str(error.value) == cleandoc(told)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x93NUMPY\x01\x00" + bytes(40), "is a NumPy array (.npy), which is not read here"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n",
            "is a pointer of Git LFS",
        ),
        (b"<!DOCTYPE html>\n<html></html>\n", "is a web page (HTML), which is not read here"),
        (gzip.compress(b"model mine", mtime=0), "is compressed by gzip, which is not read here"),
        (b'{"model_type": "llama"}', "this looks like JSON, and no plan begins so"),
    ],
)
def test_a_file_of_another_format_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    """In the place of a plan; of hardware (but JSON, which is no TOML) it is told as a mistake
    of the plan.
    """
    path = tmp_path / "plan.scale"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=re.escape(said)):
        parse_plan(load(path))
    if content.startswith(b"{"):
        return
    with pytest.raises(PlanError, match=re.escape(said)) as refused:
        load_hardware(path)
    assert refused.value.diagnostics[0].code == "E0418"
