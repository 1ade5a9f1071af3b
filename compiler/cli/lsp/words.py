"""The words of the language that are neither settings nor ops, with their meaning."""

ITEMS = {
    "use": "a file with a model, and what is set otherwise: `use \"models/llama.scale\" { dims { layers = 2 } }`",
    "model": "a model: `model NAME(tokens[batch, seq], labels[batch, seq]) { … }`",
    "op": "an op of one's own: `op swiglu(x[.., f], y[.., f]) -> [.., f] over .., f from \"my_ops:swiglu\"`",
    "mesh": "the axes of ranks and their sizes, outermost first: `mesh { dp = 2  tp = 4 }`",
    "shard": "the dims that lie over axes, in order of priority: `shard { batch over dp  heads, ffn over tp }`",
    "names": "where files of weights hold each parameter: `names hf { … }`",
}  # fmt: skip
"""The items of a plan that are no settings."""

STATEMENTS = {
    "dims": "sizes: `dims { hidden = 4096 }`",
    "const": "numbers: `const { eps = 1e-5 }`",
    "init": "how parameters begin: `init wo ~ normal(0.01)`",
    "repeat": "statements once for each index of a dim: `repeat layers { … }`",
    "if": "one body for the first iterations, another for the others: `if i < dense { … } else { … }`",
    "route": "tokens sent to experts: `route y to experts by top(y @ router[hidden -> experts], 2) { … }`",
}
"""The beginnings of statements and sections of a model."""

AXES = {"dp": "data", "tp": "tensors", "pp": "pipeline stages", "cp": "the sequence", "ep": "experts"}
"""Usual names of axes, by what lies over them."""

FUNCTIONS = {
    "normal": "`normal(0.02)`: normally distributed around 0, with this standard deviation",
    "ones": "1 everywhere",
    "zeros": "0 everywhere",
    "sqrt": "`sqrt(n)`: the square root of a number, made of dims and constants",
}
"""The functions that are no ops of tensors."""

MEANINGS = {**ITEMS, **STATEMENTS, **FUNCTIONS}
