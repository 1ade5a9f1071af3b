"""`.venv/bin/python benchmarks/exchanges.py`: what of exchanges of experts' rows is hidden beside a
shared expert.

One rank of eight, on the link of `overlap.py` in the place of its group; a peer has as many rows
for this rank as this rank for it.  Each exchange takes a share of the shortest time that any of
them has something to run beside: in forward two products of the shared expert and one, in backward
the gradients of these, and those of experts' weights.  Exposed is the part of the link's time that
the rank waits; beside it are exchanges that are awaited at once, and the same layers without a
shared expert, where only gradients of weights are left to run beside.

Bar: at most 5% exposed where an exchange is shorter than what it runs beside.

Non-goals: the exchange of counts, for which the host waits; microbatches side by side.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from types import ModuleType

import torch
import torch.distributed as dist
from emitted import compiled
from measure import asked_quick, in_turns, table, where
from overlap import RANKS, Link, LinkedMesh, Timeline
from torch.testing._internal.distributed.fake_pg import FakeStore

VOCAB, HIDDEN, EXPERT, SHARED, LAYERS = 64, 256, 256, 1024, 3
SEQ, ROWS, CHOICES = 256, 4, 2
SHARES = (0.5, 0.8, 1.2)
BESIDE = "s = (silu(m @ s_gate[hidden -> ffn]) * (m @ s_up[hidden -> ffn])) @ s_down[ffn -> hidden]"
PLAN = f"""model experts(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = {VOCAB}  hidden = {HIDDEN}  experts = {RANKS}  expert_ffn = {EXPERT}
          ffn = {SHARED}  layers = {LAYERS} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    m = rmsnorm(x, norm[hidden], 1e-5)
    y = m
    route y to experts by top(m @ router[hidden -> experts], {CHOICES}) {{
      g = silu(y @ e_gate[hidden -> expert_ffn]) * (y @ e_up[hidden -> expert_ffn])
      y = g @ e_down[expert_ffn -> hidden]
    }}
    {BESIDE}
    x = x + y + s
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
mesh {{ dp = {RANKS} }}
shard {{ experts over dp  batch over dp }}
train {{ seq = {SEQ}  global_batch = {ROWS * RANKS}  microbatch = {ROWS}  steps = 1
  optimizer sgd {{ lr = 0.1 }}  data text {{ files = [python_stdlib]  tokenizer = bytes }} }}
"""
Run = Callable[[], tuple[Timeline, Timeline]]


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    shared, alone = (
        compiled(plan)[0] for plan in (PLAN, PLAN.replace(BESIDE, "").replace("y + s", "y"))
    )
    print(f"{where()}, one thread")
    free = in_turns({"": _run(shared, Link(0.0, float("inf")))}, 3 if quick else 9)[""]
    shortest = min(median(times) for times in zip(*map(_beside, free), strict=True))
    print(f"the shortest that an exchange has beside it: {shortest * 1e3:.1f} ms")
    rows: list[tuple[str, ...]] = []
    for share in SHARES[1:2] if quick else SHARES:
        link = partial(Link, share * shortest, float("inf"))
        runs = {
            "overlapped": _run(shared, link()),
            "at once": _run(shared, link(at_once=True)),
            "without a shared expert": _run(alone, link()),
        }
        for name, found in in_turns(runs, 3 if quick else 9).items():
            exposed = (
                median(part.exposed(of_layers=True) for part in parts)
                for parts in zip(*found, strict=True)
            )
            rows.append((f"{share:.0%}", name, *(f"{each:.0%}" for each in exposed)))
    table(
        "Exposed, of the link's time",
        ("an exchange, of the shortest beside one", "", "forward", "backward"),
        rows,
    )
    dist.destroy_process_group()


def _beside(run: tuple[Timeline, Timeline]) -> list[float]:
    """Seconds from each exchange's beginning to its wait, forward and backward."""
    return [
        each.awaited - each.begun for part in run for each in part.collectives if each.is_of_a_layer
    ]


def _run(program: ModuleType, link: Link) -> Run:
    """Forward and backward of a microbatch."""
    model, state = program.build(LinkedMesh(link))
    state.initialise(0)
    rows = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Timeline, Timeline]:
        link.timeline = forward = Timeline()
        loss, _ = model(rows, rows)
        link.timeline = backward = Timeline()
        loss.backward()
        return forward, backward

    return run


if __name__ == "__main__":
    main()
