"""Random plans: models of all ops, meshes, orders of rules, ways to train.

Purpose: hypothesis strategies whose examples are texts of the language, so that a counterexample
prints as a plan.  Non-goals: every plan of the language, and sizes: what is proved of a plan does
not depend on them.
"""

from collections.abc import Sequence

from hypothesis import reject
from hypothesis import strategies as st

from ..compiler.ops import OPS
from .checks import compiles
from .random_models import REPEATS, Writer
from .random_shardings import shardings, written
from .random_states import states

SIZES = (
    "hidden = 12  ffn = 20  heads = 4  head_dim = 6  few = 6  rest = 10  wide = few + rest "
    " broad = wide + ffn"
)
LAYERS = 3
SEQ = 8
VOCABULARIES = ("28", "27 pad 4", "26 pad 28")

OPTIMIZERS = [
    "sgd { lr = 0.5  clip = {clip} }",
    "sgd { lr = 0.5  momentum = 0.9  clip = {clip} }",
    "adamw { lr = 1e-3  weight_decay = 0.1  clip = {clip}  schedule = cosine(warmup=2) }",
    'adamw { lr = 1e-3  clip = {clip}  group rows { params = ["wt*"]  weight_decay = 0.0 '
    " lr_scale = 2.0 } }",
]


class Text(str):
    """A plan's text, which counterexamples show unchanged."""

    def __repr__(self) -> str:
        return f'"""\n{self}"""'


@st.composite
def plans(draw: st.DrawFn, ops: str = "", statements: Sequence[str] = ()) -> str:
    """Texts of random plans that compile: `drafts` without those that the compiler refuses."""
    plan = draw(drafts(ops, statements))
    return plan if compiles(plan) else reject()


@st.composite
def drafts(draw: st.DrawFn, ops: str = "", statements: Sequence[str] = ()) -> str:
    """Texts of random plans, a few of which the compiler refuses.

    `ops` declares ops of one's own, and `statements` use them: each takes and leaves `x[batch, seq,
    hidden]`, `{n}` in the names of its parameters stands for a number.
    """
    sharding, vocabulary = draw(shardings()), draw(st.sampled_from(VOCABULARIES))
    body = Writer(draw, sharding, "pad" in vocabulary, own=statements).model()
    sharding = sharding.of(f"batch seq {body}")
    rules = draw(written(sharding))
    few, blocks = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (2, 1)))
    each, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    precision, gathered = (
        draw(st.sampled_from(["fp64", "fp32", "bf16"])),
        draw(st.sampled_from(["save", "regather"])),
    )
    recompute, state = draw(_recomputed(body)), draw(states(sharding, body))
    kernels = draw(st.sampled_from(["torch", "triton  logits = save", "triton  logits = chunk"]))
    optimizer = draw(st.sampled_from(OPTIMIZERS)).replace(
        "{clip}", draw(st.sampled_from(["0.0", "0.1", "100.0"]))
    )
    documents, data = (
        (", documents[batch, seq]", '  separator = "\\n"') if "documents" in body else ("", "")
    )
    sees = "bidirectional cross_document"  # a random model predicts nothing of use
    return Text(f"""{ops}model random(tokens[batch, seq], labels[batch, seq]{documents}) {sees} {{
  dims {{ vocab = {vocabulary}  {SIZES}  kv_heads = {few}  layers = {LAYERS}  blocks = {blocks} }}
  const {{ eps = 1e-5  theta = 10000  c = 0.7 }}
  init ~ normal(0.02)
{_indented(body)}
}}
mesh {{ {"  ".join(f"{axis} = {size}" for axis, size in sharding.axes.items())} }}
shard {{
{_indented(rules)}
}}
state {{
{_indented(state)}
}}
train {{
  seq = {SEQ}  global_batch = {microbatches * each * sharding.ranks("batch")}  microbatch = {each}
  steps = 1  kernels = {kernels}  gathered = {gathered}
  precision = {precision}  recompute = {recompute}
  optimizer {optimizer}
  data text {{ files = [python_stdlib]{data} }}
}}
""")


@st.composite
def _recomputed(draw: st.DrawFn, body: str) -> str:
    """Nothing, all, some layers, or some of the ops that a body calls; the compiler refuses ops
    that are divided.
    """
    called = [
        name
        for name, entry in OPS.items()
        if entry.user_visible and entry.function and f" {name}(" in body
    ]
    repeated = [dim for dim in REPEATS if f"repeat {dim} " in body]
    words = ["none", "full", *["every"] * bool(repeated), *["selective"] * bool(called)]
    match draw(st.sampled_from(words)):
        case "every":
            return f"every({draw(st.integers(2, LAYERS))}, {repeated[-1]})"
        case "selective":
            names = draw(st.lists(st.sampled_from(called), min_size=1, max_size=3, unique=True))
            return f"selective({', '.join(names)})"
        case word:
            return word


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
