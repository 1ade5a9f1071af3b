"""Random small plans: models, meshes and orders of rules."""

from hypothesis import strategies as st

from ir.plans import ATTENTION, HEAD, MLP, START, Plan

LINES = [
    "x = x + silu(x)",
    "y = rmsnorm(x, g{n}[hidden], eps)  x = x + y * y",
    "y = silu(x @ u{n}[hidden -> ffn]) @ v{n}[ffn -> hidden]  x = x + y + silu(y)",
    "y = silu(x @ u{n}[hidden -> ffn])  x = x + y @ v{n}[ffn -> hidden] + (y * y) @ w{n}[ffn -> hidden] + c",
    "x = x + c * silu(x)",
    "x = rmsnorm(x, g{n}[hidden], eps) + x",
    "x = x + silu(x @ u{n}[hidden -> ffn] + b{n}[ffn]) @ v{n}[ffn -> hidden]",
    "x = x + silu(x @ u{n}[hidden -> ffn]) @ v{n}[ffn -> hidden] + b{n}[hidden]",
    "x = x + silu(x) @ s{n}[hidden -> ffn] @ t{n}[ffn -> hidden] * (e{n}[hidden] * f{n}[hidden])",
    "y = x @ p{n}[hidden -> ffn]  x = x + silu(y) @ q{n}[ffn -> hidden] + y @ r{n}[ffn -> hidden]",
    "y = silu(x) @ shared  x = x + silu(y) @ o{n}[ffn -> hidden]",
    ATTENTION.replace("[", "{n}["),
    MLP.replace("[", "{n}["),
]
MESHES = [
    ("dp = 2", 2, ("dp",)),
    ("tp = 2", 1, ("tp",)),
    ("tp = 4", 1, ("tp",)),
    ("dp = 2  tp = 2", 2, ("dp", "tp")),
    ("tp = 2  dp = 2", 2, ("dp", "tp")),
    ("dp = 2  cp = 2  tp = 2", 2, ("dp", "tp", "cp")),
]


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """A model: an embedding, statements in repeats of any nesting up to two, and a head."""
    number = iter(range(100))

    def lines(most: int) -> str:
        chosen = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=most))
        return "\n".join(line.replace("{n}", str(next(number))) for line in chosen)

    parts = [START, "c = rmsnorm(x, norm0[hidden], eps) @ shared[hidden -> ffn] @ back[ffn -> hidden]  x = x + c"]
    for _ in range(draw(st.integers(0, 2))):
        inner = lines(2)
        nested = draw(st.booleans())
        parts.append(
            f"repeat layers {{ {inner} }}"
            if not nested
            else f"repeat blocks {{ repeat layers {{ {inner} }} {lines(1)} }}"
        )
    parts.append(lines(2))
    tied = draw(st.booleans())
    return "\n".join([*parts, HEAD.replace("head[hidden -> vocab]", "wte") if tied else HEAD])


@st.composite
def shards(draw: st.DrawFn, axes: tuple[str, ...]) -> str:
    """Rules in any order, with any of the dims."""
    rules = ["batch over dp"] if "dp" in axes else []
    if "tp" in axes:
        weights = draw(st.sets(st.sampled_from(["vocab", "ffn", "heads, kv_heads", "heads"]), min_size=1))
        together = draw(st.booleans())
        rules += (
            [f"{', '.join(sorted(weights))} over tp"] if together else [f"{dims} over tp" for dims in sorted(weights)]
        )
        rules += ["seq over cp, tp" if "cp" in axes else "seq over tp"] * draw(st.booleans())
    if "cp" in axes and not any("cp" in rule for rule in rules):
        rules.append("seq over cp")
    return "  ".join(draw(st.permutations(rules)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan that the compiler may still refuse."""
    mesh, ranks, axes = draw(st.sampled_from(MESHES))
    gathered = draw(st.sampled_from(["save", "regather"]))
    return Plan(
        draw(bodies()),
        mesh,
        draw(shards(axes)),
        ranks,
        microbatches=draw(st.integers(1, 2)),
        train=f"precision = fp64  gathered = {gathered}",
    )
