"""The table of strategies.md: `python docs/strategies.py` compiles a plan for each strategy and
writes its row.

Figures are of one rank and one step: memory as `scalec explain memory` counts it, bytes sent as
`scalec explain collectives` does, seconds as `scalec explain time` predicts them.
"""

from pathlib import Path
from typing import NamedTuple

from page_tables import markdown, write

from scalec.compiler.analysis.communication import collectives
from scalec.compiler.analysis.link_traffic import get_sent_bytes
from scalec.compiler.analysis.memory import Account, account
from scalec.compiler.analysis.time import get_expected_report
from scalec.compiler.config.units import amount
from scalec.compiler.ir import Program
from scalec.compiler.reports.time import seconds
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "strategies.md"
SMALL = 2**20
"""Bytes below which a collective is not named: counts, the loss and the norm."""

PLAN = """use "models/{model}.scale"
cluster {{ gpu = h100_sxm  gpus_per_node = 8 }}
mesh {{ {mesh} }}
shard {{ {shard} }}
{sections}
train {{
  seq = 8192  global_batch = 8  microbatch = 1  steps = 1000  precision = bf16
  optimizer adamw {{ lr = 3e-4 }}
  data tokens {{ files = ["tokens.bin"]  dtype = uint32 }}
}}
"""

TENSORS = "vocab, heads, kv_heads, ffn over tp"


class Strategy(NamedTuple):
    """A row of the table: a name, and the sections of its plan."""

    name: str
    mesh: str
    shard: str
    sections: str = ""
    model: str = "llama"

    def plan(self) -> str:
        """The plan's text."""
        return PLAN.format(
            model=self.model, mesh=self.mesh, shard=self.shard, sections=self.sections
        )

    def words(self) -> str:
        """The sections as the table shows them."""
        parts = [f"`mesh {{ {self.mesh} }}`", f"`shard {{ {self.shard} }}`"]
        parts += [f"`{line}`" for line in self.sections.splitlines()]
        return " ".join(parts)


STRATEGIES = (
    Strategy("data parallel (DDP)", "dp = 8", "batch over dp"),
    Strategy("ZeRO 1", "dp = 8", "batch over dp", "state { zero 1 over dp }"),
    Strategy("ZeRO 2", "dp = 8", "batch over dp", "state { zero 2 over dp }"),
    Strategy("ZeRO 3 (FSDP)", "dp = 8", "batch over dp", "state { zero 3 over dp }"),
    Strategy(
        "ZeRO 3 in groups (HSDP)",
        "replica = 2  dp = 4",
        "batch over replica, dp",
        "state { zero 3 over dp }",
    ),
    Strategy("tensor parallel", "tp = 8", TENSORS),
    Strategy("tensor and sequence parallel", "tp = 8", f"{TENSORS}  seq over tp"),
    Strategy(
        "context parallel, a ring",
        "cp = 8",
        "seq over cp as zigzag via ring",
        "state { zero 3 over cp }",
    ),
    Strategy(
        "context parallel, exchanged heads (Ulysses)",
        "cp = 8",
        "seq over cp via ulysses",
        "state { zero 3 over cp }",
    ),
    Strategy("pipeline", "pp = 8", "layers over pp", "pipeline { schedule = 1f1b }"),
    Strategy(
        "experts (Mixtral 8x7B)",
        "ep = 8",
        "experts over ep  batch over ep",
        "state { zero 3 over ep }",
        "mixtral",
    ),
)


def _state(memory: Account) -> int:
    return sum(bucket.total for bucket in memory.buckets)


def _sent(program: Program) -> str:
    """The bytes that a rank sends by each kind of collective, the most first."""
    by_op: dict[str, int] = {}
    for collective in collectives(program):
        by_op[collective.op] = by_op.get(collective.op, 0) + get_sent_bytes(collective)
    large = sorted(by_op.items(), key=lambda item: -item[1])
    return ", ".join(f"{op} {amount(size)}" for op, size in large if size >= SMALL)


def cells(strategy: Strategy) -> list[str]:
    """The strategy's row of the table."""
    program = compile_plan(Source(str(ROOT / "plans" / "strategy.scale"), strategy.plan()))
    memory, report = account(program), get_expected_report(program)
    assert report
    tokens = program.elements(program.types["tokens"])
    return [
        strategy.name,
        strategy.words(),
        f"{program.size(program.microbatches.dim)} of {tokens:,}",
        amount(_state(memory)),
        amount(memory.activations),
        amount(memory.total),
        _sent(program),
        seconds(report.step.seconds),
    ]


def table() -> str:
    """The table as the page has it."""
    heads = "strategy, in the plan, microbatches of tokens, state, activations, peak, sent, step"
    return markdown(heads.split(", "), [cells(strategy) for strategy in STRATEGIES])


if __name__ == "__main__":
    write(PAGE, Path(__file__).name, table())
