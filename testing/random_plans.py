"""Random plans: models of all ops, meshes, orders of rules, ways to train.

Purpose: hypothesis strategies whose examples are texts of the language, so that a counterexample prints as a plan.
Non-goals: every plan of the language, and sizes: what is proved of a plan does not depend on them.
"""

import re
from collections.abc import Sequence
from math import prod

from attrs import frozen
from hypothesis import reject
from hypothesis import strategies as st

from ..compiler.ops import OPS
from .checks import compiles
from .random_models import Dims, Writer

SIZES = "hidden = 12  ffn = 20  heads = 4  head_dim = 6  few = 6  rest = 10  wide = few + rest  broad = wide + ffn"
LAYERS = 3
SEQ = 8
VOCABULARIES = ("28", "27 pad 4", "26 pad 28")
ALONE = ("hidden", "broad", "wide")
"""Dims of weights that may lie over an axis if none of the others does."""

OPTIMIZERS = [
    "sgd { lr = 0.5  clip = {clip} }",
    "sgd { lr = 0.5  momentum = 0.9  clip = {clip} }",
    "adamw { lr = 1e-3  weight_decay = 0.1  clip = {clip}  schedule = cosine(warmup=2) }",
    'adamw { lr = 1e-3  clip = {clip}  group rows { params = ["wt*"]  weight_decay = 0.0  lr_scale = 2.0 } }',
]


class Text(str):
    """A plan's text, which counterexamples show as it stands."""

    def __repr__(self) -> str:
        return f'"""\n{self}"""'


@frozen
class Sharding:
    """The rules of `shard` in order: a dim and its axes, outer first."""

    axes: dict[str, int]
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    def works(self, dims: Dims) -> set[str]:
        """The dims that an op works on, whose operands and results have these: on each axis by the first rule."""
        found = (next((dim for dim, over in self.rules if axis in over and dim in dims), "") for axis in self.axes)
        return {*found} - {""}

    def clash(self, dims: Dims) -> bool:
        """Whether two of these, as dims of one parameter, lie over one axis."""
        over = [axis for dim, axes in self.rules if dim in dims and dim != "seq" for axis in axes]
        return len({*over}) < len(over)

    def of(self, body: str) -> "Sharding":
        """What is left of it for a model: rules for dims that it has, and axes that they name or of size 1."""
        rules = tuple((dim, over) for dim, over in self.rules if re.search(rf"\b{dim}\b", body))
        used = {axis for _, over in rules for axis in over}
        return Sharding({axis: size for axis, size in self.axes.items() if axis in used or size == 1}, rules)

    def ranks(self, dim: str) -> int:
        """Over how many ranks a dim lies."""
        return prod(self.axes[axis] for axis in dict(self.rules).get(dim, ()))


@st.composite
def plans(draw: st.DrawFn, ops: str = "", statements: Sequence[str] = ()) -> str:
    """Texts of random plans that compile: `drafts` without those that the compiler refuses."""
    plan = draw(drafts(ops, statements))
    return plan if compiles(plan) else reject()


@st.composite
def drafts(draw: st.DrawFn, ops: str = "", statements: Sequence[str] = ()) -> str:
    """Texts of random plans, a few of which the compiler refuses.

    `ops` declares ops of one's own, and `statements` use them: each takes and leaves `x[batch, seq, hidden]`, `{n}` in
    the names of its parameters stands for a number.
    """
    sharding, vocabulary = draw(_shardings()), draw(st.sampled_from(VOCABULARIES))
    body = Writer(draw, sharding, "pad" in vocabulary, statements).model()
    sharding = sharding.of(f"batch seq {body}")
    rules = draw(_written(sharding))
    few, blocks = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (2, 1)))
    each, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    precision, gathered = draw(st.sampled_from(["fp64", "fp32", "bf16"])), draw(st.sampled_from(["save", "regather"]))
    recompute = draw(_recomputed(body))
    optimizer = draw(st.sampled_from(OPTIMIZERS)).replace("{clip}", draw(st.sampled_from(["0.0", "0.1", "100.0"])))
    documents, data = (", documents[batch, seq]", '  separator = "\\n"') if "documents" in body else ("", "")
    return Text(f"""{ops}model random(tokens[batch, seq], labels[batch, seq]{documents}) {{
  dims {{ vocab = {vocabulary}  {SIZES}  kv_heads = {few}  layers = {LAYERS}  blocks = {blocks} }}
  const {{ eps = 1e-5  theta = 10000  c = 0.7 }}
  init ~ normal(0.02)
{_indented(body)}
}}
mesh {{ {"  ".join(f"{axis} = {size}" for axis, size in sharding.axes.items())} }}
shard {{
{_indented(rules)}
}}
train {{
  seq = {SEQ}  global_batch = {microbatches * each * sharding.ranks("batch")}  microbatch = {each}
  steps = 1  precision = {precision}  gathered = {gathered}  recompute = {recompute}
  optimizer {optimizer}
  data text {{ files = [python_stdlib]{data} }}
}}
""")


@st.composite
def _recomputed(draw: st.DrawFn, body: str) -> str:
    """Nothing, all, or some of the ops that a body calls; those that are divided over ranks the compiler refuses."""
    called = [name for name, entry in OPS.items() if entry.surface and entry.function and f" {name}(" in body]
    how = draw(st.sampled_from(["none", "full", "selective"]))
    if how != "selective" or not called:
        return how.replace("selective", "none")
    names = draw(st.lists(st.sampled_from(called), min_size=1, max_size=3, unique=True))
    return f"selective({', '.join(names)})"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# ---- meshes and rules

ROLES = {"replica": "batch", "dp": "batch", "tp": "weights", "ep": "weights", "cp": "seq"}
"""What lies over an axis of such a name: the batch, weights, or the sequence alone."""


@st.composite
def _shardings(draw: st.DrawFn) -> Sharding:
    """One to three axes in any order, of eight ranks at most, and rules for them."""
    names = draw(st.lists(st.sampled_from([*ROLES]), min_size=1, max_size=3, unique=True))
    most = 4 if len(names) < 3 and {*names} != {"tp", "ep"} else 2
    axes = {name: draw(st.sampled_from([size for size in (2, 4, 1) if size <= most])) for name in names}
    if len(names) == 2 and {*axes.values()} == {4}:
        axes[names[0]] = 2
    over: dict[str, list[str]] = {"batch": [name for name in names if ROLES[name] == "batch"]}
    for axis in (name for name in names if ROLES[name] == "weights"):
        for dim in draw(_claimed()):
            over.setdefault(dim, []).append(axis)
    rules = draw(st.permutations([(dim, tuple(on)) for dim, on in over.items() if on]))
    sequence = tuple(a for a in names if ROLES[a] == "seq" or (ROLES[a] == "weights" and draw(st.booleans())))
    at = len(rules) if draw(st.integers(0, 3)) else draw(st.integers(0, len(rules)))
    return Sharding(axes, (*rules[:at], *([("seq", sequence)] if sequence else []), *rules[at:]))


@st.composite
def _claimed(draw: st.DrawFn) -> list[str]:
    """Dims of weights that one axis splits; key/value heads only together with those of queries."""
    if not draw(st.integers(0, 3)):
        return [draw(st.sampled_from(ALONE))]
    dims = draw(st.sets(st.sampled_from(["vocab", "ffn"])))
    heads = draw(
        st.sampled_from([["heads", "kv_heads"], ["heads"], []] if dims else [["heads", "kv_heads"], ["heads"]])
    )
    return [*sorted(dims), *heads]


@st.composite
def _written(draw: st.DrawFn, sharding: Sharding) -> str:
    """The rules as text: one line for each, or neighbours over the same axes together."""
    lines: list[tuple[str, tuple[str, ...]]] = []
    together = draw(st.booleans())
    for dim, over in sharding.rules:
        if together and lines and lines[-1][1] == over and dim != "seq":
            lines[-1] = (f"{lines[-1][0]}, {dim}", over)
        else:
            lines.append((dim, over))
    return "\n".join(f"{dims} over {', '.join(over)}" for dims, over in lines)
