"""The rows that a rank's experts get, against every choice that tokens can make."""

from collections import Counter
from itertools import combinations, product
from math import ceil

import pytest

from scalec.compiler.analysis.expert_loads import loads, rows_of_an_expert
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 8  hidden = 4  experts = {experts}  expert_ffn = 4  layers = 2 }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    y = x
    route y to experts by top(y @ router[hidden -> experts], {k}{capacity}) {{
      y = silu(y @ up[hidden -> expert_ffn]) @ down[expert_ffn -> hidden]
    }}
    x = x + y
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
mesh {{ {mesh} }}
shard {{ {rules} }}
train {{
  seq = {seq}  global_batch = 8  microbatch = 1  steps = 1  {room}
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = ["a"] }}
}}
"""


def program(
    rules: str,
    mesh: str,
    experts: int = 4,
    k: int = 2,
    seq: int = 2,
    capacity: float = 0.0,
    room: float = 0.0,
) -> Program:
    limit = f", capacity={capacity}" if capacity else ""
    said = f"room = {room}" if room else ""
    text = PLAN.format(
        rules=rules, mesh=mesh, experts=experts, k=k, seq=seq, capacity=limit, room=said
    )
    return compile_plan(Source("tiny.scale", text))


def most(sequences: int, seq: int, experts: int, k: int, held: int, capacity: float) -> int:
    """Of all choices of so many sequences, those that send most rows to the first `held`
    experts.
    """
    limit = ceil(capacity * seq * k / experts) if capacity else seq

    def rows(choices: tuple[tuple[int, ...], ...]) -> int:
        counts = Counter(expert for token in choices for expert in token)
        return sum(min(counts[expert], limit) for expert in range(held))

    return sequences * max(map(rows, product(combinations(range(experts), k), repeat=seq)))


FOLDINGS = {
    "an axis of tokens": ("experts over dp  batch over dp", "dp = 2", 2, 2),
    "all axes of tokens": ("experts over dp, ep  batch over dp, ep", "dp = 2  ep = 2", 4, 4),
    "one of two axes": ("experts over ep  batch over dp, ep", "dp = 2  ep = 2", 2, 2),
    "the same tokens": ("experts over tp  batch over dp", "dp = 2  tp = 2", 1, 2),
}
"""Rules and mesh, the ranks whose tokens come together, and those that experts lie over."""


@pytest.mark.sample(30)
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(("experts", "k", "seq"), [(4, 1, 3), (4, 2, 3), (4, 3, 2), (8, 3, 2)])
@pytest.mark.parametrize("folding", FOLDINGS)
def test_the_worst_is_the_most_that_tokens_can_choose(
    folding: str, experts: int, k: int, seq: int, capacity: float
) -> None:
    rules, mesh, together, over = FOLDINGS[folding]
    worst = most(together, seq, experts, k, experts // over, capacity)
    balanced, room, all_ = loads(program(rules, mesh, experts, k, seq, capacity)) or (
        None,
        None,
        None,
    )
    if balanced and room and all_:
        equal = together * seq * k // over
        assert all_.rows == {"experts": worst}
        assert balanced.rows == {"experts": min(worst, equal)}
        assert room.rows == {"experts": min(worst, together * seq * k * 5 // (4 * over))}
    else:
        assert worst == together * seq * k // over


def test_room_is_the_plans_own() -> None:
    rules, mesh, *_ = FOLDINGS["all axes of tokens"]
    _, room, _ = loads(program(rules, mesh, seq=4, room=1.5))
    assert (room.name, room.rows) == ("room = 1.5", {"experts": 12})


def test_experts_on_every_rank_have_one_load() -> None:
    assert loads(program("batch over dp", "dp = 2")) == ()


@pytest.mark.parametrize(
    ("folding", "mean"),
    [("an axis of tokens", 4), ("all axes of tokens", 8), ("the same tokens", 2)],
)
def test_the_mean_of_an_expert(folding: str, mean: int) -> None:
    """Of 4 experts: the choices of 4 tokens of each rank that are exchanged, two of each."""
    rules, mesh, *_ = FOLDINGS[folding]
    it = program(rules, mesh, seq=4)
    (sort,) = (op for op in it.ops if op.kind == "sort_by_expert")
    assert rows_of_an_expert(it, sort) == mean
