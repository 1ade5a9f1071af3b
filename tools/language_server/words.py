"""The words of the language that are neither settings nor ops, with their meaning."""

import re

WORDS = re.compile(r'#[^\n]*|"(?:[^"\\\n]|\\.)*"?|->|\.\.|[\w.]+%?|\S')
"""The words of a text, and its comments and strings as one each."""

ITEMS = {
    "use": "a file with a model, and what is set otherwise: `use \"models/llama.scale\" { dims {"
        " layers = 2 } }`",
    "model": "a model: `model NAME(tokens[batch, seq], labels[batch, seq]) { … }`",
    "op": "an op of one's own: `op swiglu(x[.., f], y[.., f]) -> [.., f] over .., f from"
        " \"my_ops:swiglu\"`",
    "mesh": "the axes of ranks and their sizes, outermost first: `mesh { dp = 2  tp = 4 }`",
    "shard": "the dims that lie over axes, in order of priority: `shard { batch over dp  heads, ffn"
        " over tp }`",
    "names": "where files of weights hold each parameter: `names hf { … }`",
}  # fmt: skip
"""The items of a plan that are no settings."""

STATEMENTS = {
    "dims": "sizes: `dims { hidden = 4096 }`",
    "const": "numbers: `const { eps = 1e-5 }`",
    "init": "how parameters begin: `init wo ~ normal(0.01)`",
    "repeat": "statements once for each index of a dim: `repeat layers { … }`",
    "if": "one body for the first iterations, another for the others: `if i < dense { … } else {"
    " … }`",
    "route": "tokens sent to experts: `route y to experts by top(y @ router[hidden -> experts], 2)"
    " { … }`",
}
"""The beginnings of statements and sections of a model."""

AXES = {
    "dp": "data",
    "tp": "tensors",
    "pp": "pipeline stages",
    "cp": "the sequence",
    "ep": "experts",
}
"""Usual names of axes, and the things that lie over them."""

FUNCTIONS = {
    "normal": "`normal(0.02)`: normally distributed around 0, with this standard deviation",
    "ones": "1 everywhere",
    "zeros": "0 everywhere",
    "sqrt": "`sqrt(n)`: the square root of a number, made of dims and constants",
}
"""The functions that are no ops of tensors."""

INITIAL = ("normal", "ones", "zeros")
"""The words for the initial values of parameters."""

KEYWORDS = {
    "over": "the axes over which dims or state are sharded: `heads, ffn over tp`",
    "as": "how a rule's positions are laid out, or the name of a repeat's index: `repeat layers"
    " as i { … }`",
    "via": "how attention reaches the keys of other ranks: `seq over cp via ring`",
    "zero": "the stage of ZeRO: 1 shards the optimizer's state, 2 gradients too, 3 parameters too",
    "pad": "a dim made longer, so that axes divide it: `vocab = 50257 pad 128`",
    "every": "how often: `finite every 10`",
    "else": "the body for the other iterations of a repeat",
    "by": "what chooses the experts of a token: `by top(logits, 2)`",
}
"""The words between names."""

MEANINGS = {**ITEMS, **STATEMENTS, **FUNCTIONS, **KEYWORDS}
