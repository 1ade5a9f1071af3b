"""Random plans of up to five axes with experts: where all lie, and how the step is cut, shared out
and recomputed.

Purpose: hypothesis strategies whose examples are texts of the language, some of which the compiler
refuses.  Non-goals: models of every op (`scalec.testing`), whose plans have neither stages nor
experts.
"""

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from scalec.testing.random_plans import Text

ATTENTION = """
    a = rmsnorm(x, norm1[hidden], eps)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], theta)
    x = x + attention(q, k, a @ wv[hidden -> kv_heads, head_dim], mask=causal{window}) @ wo[heads, head_dim -> hidden]
    m = rmsnorm(x, norm2[hidden], eps)"""
DENSE = "x = x + silu(m @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden]"
ROUTED = """y = m
    route y to experts by top(m @ router[hidden -> experts], {k}{settings}) {{
      y = (silu(y @ e_gate[hidden -> expert_ffn]) * (y @ e_up[hidden -> expert_ffn])) @ e_down[expert_ffn -> hidden]
    }}"""
LAYERS = {
    "routed": "{routed}\n    x = x + y",
    "shared": "{routed}\n    x = x + y + silu(m @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden]",
    "dense before": "if i < 1 {{\n      {dense}\n    }} else {{\n    {routed}\n    x = x + y }}",
    "dense after": "if i < 2 {{\n    {routed}\n    x = x + y\n    }} else {{\n      {dense} }}",
    "twice": """{routed}
    x = x + y
    z = rmsnorm(x, norm3[hidden], eps)
    route z to experts by top(z @ router2[hidden -> experts], {k}) {{
      z = gelu(z @ e_in[hidden -> ffn]) @ e_out[ffn -> hidden]
    }}
    x = x + z""",
}
ROLES = {
    "pp": "layers",
    "replica": "batch",
    "dp": "batch",
    "ep": "batch",
    "cp": "seq",
    "uly": "seq",
    "tp": "weights",
}
SEQUENCE = ("cp", "uly", "tp")
SCHEDULES = (
    *("gpipe", "1f1b", "interleaved_1f1b(chunks=2)", "breadth_first(chunks=2)", "zb_h1", "zb_h2"),
    *("interleaved_zero_bubble(chunks=2)", "zbv", "dualpipev"),
)
STRATEGIES = (
    "",
    "via gather",
    "via ring",
    "as zigzag",
    "as zigzag via gather",
    "as zigzag via ring",
)
RECOMPUTE = (
    "none",
    "full",
    "every(2, layers)",
    "selective(dispatch)",
    "selective(silu, dispatch)",
    "selective(attention)",
)


@st.composite
def choices(draw: st.DrawFn) -> str:
    """The settings of `top`, after its logits and how many it chooses."""
    said = list[str]()
    drawn = {
        "score": ("", "sigmoid"),
        "normalise": ("", "on"),
        "scale": ("", "2.5"),
        "capacity": ("", "", "1.25"),
        "balance": ("", "0.01"),
        "z": ("", "0.001"),
    }
    for name, values in drawn.items():
        if value := draw(st.sampled_from(values)):
            said.append(f"{name}={value}")
    return "".join(
        f", {each}"
        for each in [*said, *(["groups=4", "from=2"] if draw(st.integers(0, 3)) == 0 else [])]
    )


@st.composite
def shardings(draw: st.DrawFn, sizes: dict[str, int], ffn: str) -> str:
    """Rules for a mesh: all axes have their usual dims, and experts lie over any of those of the
    tokens, or over tp.

    `ffn` is the model's rule for that dim.
    """
    of = {
        role: [axis for axis in sizes if ROLES[axis] == role]
        for role in ("batch", "seq", "weights")
    }
    sequence, parted = draw(st.booleans()), draw(st.integers(0, 4)) == 0
    tokens = [*of["batch"], *of["seq"], *(of["weights"] if sequence and not parted else [])]
    over = draw(st.lists(st.sampled_from(tokens), unique=True)) if tokens else []
    if not over and of["weights"] and not parted:
        over = of["weights"]
    rules = [f"experts over {', '.join(axis for axis in sizes if axis in over)}"] if over else []
    rules += [f"batch over {', '.join(of['batch'])}"] if of["batch"] else []
    rules += [f"seq over cp {draw(st.sampled_from(STRATEGIES))}"] if "cp" in sizes else []
    rules += ["seq over uly via ulysses"] if "uly" in sizes else []
    if of["weights"]:
        vocab, parts = draw(st.sampled_from(("vocab, ", ""))), ", expert_ffn" if parted else ""
        rules += [
            f"{vocab}heads, kv_heads{ffn}{parts} over tp",
            *(["seq over tp"] if sequence else []),
        ]
    return "\n  ".join([*rules, *(["layers over pp"] if "pp" in sizes else [])])


@st.composite
def plans(draw: st.DrawFn) -> str:
    """Texts of random plans."""
    sizes = draw(meshes())
    layer = draw(st.sampled_from([*LAYERS]))
    k, settings = draw(st.sampled_from((1, 2, 3))), draw(choices())
    routed = ROUTED.format(k=k, settings=settings)
    body = ATTENTION.format(window=draw(st.sampled_from(("", "", ", window=5"))))
    body += "\n    " + LAYERS[layer].format(routed=routed, dense=DENSE, k=k)
    data = [axis for axis in sizes if ROLES[axis] in ("batch", "seq")]
    shared = draw(st.lists(st.sampled_from(data), min_size=1, unique=True)) if data else []
    state = f"zero {draw(st.integers(0, 3))} over {', '.join(shared)}" if shared else ""
    caps = draw(st.sampled_from(("", "bucket = 1KiB", "prefetch = 0"))) if state else ""
    pipeline = (
        f"pipeline {{ schedule = {draw(st.sampled_from(SCHEDULES))} }}" if "pp" in sizes else ""
    )
    microbatches = draw(st.sampled_from((4, 8) if pipeline else (1, 2)))
    batch = 2 * microbatches * prod(size for axis, size in sizes.items() if ROLES[axis] == "batch")
    return Text(f"""model random(tokens[batch, seq], labels[batch, seq]) {{
  dims {{
    vocab = 32  hidden = 16  heads = 8  kv_heads = {draw(st.sampled_from((8, 4)))}  head_dim = 4
    ffn = 24  experts = 16  expert_ffn = 12  layers = 4
  }}
  const {{ eps = 1e-5  theta = 10000 }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {"as i " if "if i" in body else ""}{{{body}
  }}
  loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ head[hidden -> vocab], labels)
}}
mesh {{ {"  ".join(f"{axis} = {size}" for axis, size in sizes.items())} }}
shard {{
  {draw(shardings(sizes, ", ffn" if "ffn" in body.replace("expert_ffn", "") else ""))}
}}
state {{ {state}  {caps} }}
{pipeline}
train {{
  seq = 16  global_batch = {batch}  microbatch = 2  steps = 1
  precision = {draw(st.sampled_from(("fp64", "bf16", "fp16")))}
  gathered = {draw(st.sampled_from(("save", "regather")))}
  recompute = {draw(st.sampled_from(RECOMPUTE))}
  kernels = {draw(st.sampled_from(("torch", "triton")))}
  optimizer adamw {{ lr = 1e-3  clip = {draw(st.sampled_from(("0.0", "0.1")))} }}
  data text {{ files = [python_stdlib] }}
}}
""")


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    """Three to five axes of two or four ranks in any order, but for those that cut the
    sequence; of two stages.
    """
    names: Sequence[str] = draw(
        st.lists(st.sampled_from([*ROLES]), min_size=3, max_size=5, unique=True)
    )
    places = [at for at, axis in enumerate(names) if axis in SEQUENCE]
    order = dict(zip(places, sorted((names[at] for at in places), key=SEQUENCE.index), strict=True))
    return {
        order.get(at, axis): 2 if axis == "pp" else draw(st.sampled_from((2, 2, 4)))
        for at, axis in enumerate(names)
    }
