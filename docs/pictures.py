"""The pictures of the documents, each drawn from plans: `python docs/pictures.py` writes
docs/pictures/*.svg.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from attrs import evolve
from collectives_picture import draw_collectives

from scalec.compiler.analysis.communication import collectives
from scalec.compiler.analysis.link_traffic import crosses, get_sent_bytes
from scalec.compiler.analysis.memory import Account, account
from scalec.compiler.config.units import amount
from scalec.compiler.ir import Program
from scalec.compiler.reports.summary import axes_of, get_launch
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.timeline import Times, simulate
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.tools.drawing import Canvas, ticks
from scalec.tools.report.calls import busiest, by_rank
from scalec.tools.report.command import subject
from scalec.tools.report.model import draw_model, model

ROOT = Path(__file__).parents[1]
WIDTH, HIGH, LEFT, RIGHT, TOP = 760, 260, 86, 190, 56
MARK = "Drawn by docs/pictures.py"

PLAN = """use "models/llama.scale"
cluster {{ gpu = h100_sxm  gpus_per_node = 8  nodes = {nodes} }}
mesh {{ {mesh} }}
shard {{ {shard} }}
{sections}
train {{
  seq = {seq}  global_batch = {batch}  microbatch = 1  steps = 1000  precision = bf16  {train}
  optimizer adamw {{ lr = 3e-4 }}
  data tokens {{ files = ["tokens.bin"]  dtype = uint32 }}
}}
"""
"""Llama 3 8B."""


def llama(
    mesh: str, shard: str, ranks: int, *, seq: int = 8192, sections: str = "", train: str = ""
) -> Program:
    """The compiled plan."""
    nodes = max(ranks // 8, 1)
    text = PLAN.format(
        nodes=nodes,
        mesh=mesh,
        shard=shard,
        sections=sections,
        seq=seq,
        batch=max(ranks, 8),
        train=train,
    ).replace("gpus_per_node = 8", f"gpus_per_node = {min(ranks, 8)}")
    return compile_plan(Source(str(ROOT / "plans" / "picture.scale"), text))


class Series(NamedTuple):
    """A line of a chart, or the bars of one colour: a name and a value for each place of the
    axis.
    """

    name: str
    values: Sequence[float]


class Chart:
    """Axes with titles, and values as lines or as bars upon each other."""

    def __init__(
        self,
        title: str,
        source: str,
        axis: str,
        places: Sequence[str],
        said: Callable[[float], str],
    ) -> None:
        self.canvas, self._places, self._said = Canvas(WIDTH), places, said
        self.canvas.words(12, 18, title, "head")
        self.canvas.words(12, 34, source, "muted")
        self.canvas.words((LEFT + WIDTH - RIGHT) / 2, TOP + HIGH + 34, axis, "mid muted")

    def lines(self, series: Sequence[Series], unit: float) -> None:
        """A line for each series, named at its end."""
        most = self._scale(max(max(it.values) for it in series), unit)
        # names from below, none over another
        order = sorted(enumerate(series), key=lambda pair: pair[1].values[-1])
        free = TOP + HIGH + 4.0
        for at, it in order:
            points = [
                (self._x(place), self._y(value, most)) for place, value in enumerate(it.values)
            ]
            self.canvas.path(points, f"trace l{at}")
            for point in points:
                self.canvas.dot(*point, 3, f"s{at}")
            y = min(points[-1][1] + 4, free)
            free = y - 14
            self.canvas.words(points[-1][0] + 10, y, it.name, f"t{at}")

    def bars(self, series: Sequence[Series], unit: float) -> None:
        """A bar for each place, its series upon each other, with the sum on top and names at
        the right.
        """
        totals = [sum(values) for values in zip(*(it.values for it in series), strict=True)]
        most, half = (
            self._scale(max(totals), unit),
            min((WIDTH - LEFT - RIGHT) / len(self._places) * 0.32, 34),
        )
        below = [0.0] * len(totals)
        for at, it in enumerate(series):
            for place, value in enumerate(it.values):
                x, top = self._x(place), self._y(below[place] + value, most)
                self.canvas.box(
                    x - half, top, 2 * half, self._y(below[place], most) - top, f"s{at}", it.name, 0
                )
                below[place] += value
        for place, total in enumerate(totals):
            self.canvas.words(
                self._x(place), self._y(total, most) - 5, self._said(total), "mid small"
            )
        for at, it in enumerate(reversed(series)):
            y = TOP + 20 + at * 18
            self.canvas.box(WIDTH - RIGHT + 20, y - 9, 10, 10, f"s{len(series) - 1 - at}")
            self.canvas.words(WIDTH - RIGHT + 36, y, it.name)

    def _scale(self, highest: float, unit: float) -> float:
        most = highest * 1.08
        for tick in ticks(most / unit):
            y = self._y(tick * unit, most)
            self.canvas.line(LEFT, y, WIDTH - RIGHT, y)
            self.canvas.words(LEFT - 8, y + 4, self._said(tick * unit), "end muted")
        for place, name in enumerate(self._places):
            self.canvas.words(self._x(place), TOP + HIGH + 16, name, "mid")
        return most

    def _x(self, place: int) -> float:
        return LEFT + (place + 0.5) * (WIDTH - LEFT - RIGHT) / len(self._places)

    def _y(self, value: float, most: float) -> float:
        return TOP + HIGH * (1 - value / most)


GIB, MIB = 1024.0**3, 1024.0**2


def gib(size: float) -> str:
    """Bytes on an axis."""
    return amount(round(size)).replace(".0 ", " ")


def saved_activations() -> Canvas:
    """Activation memory over the sequence's length, by what is recomputed."""
    lengths = (4096, 8192, 16384, 32768)
    shard = "batch over dp  vocab, heads, kv_heads, ffn over tp  seq over tp"
    kinds = {
        "none": "",
        "selective(attention)": "recompute = selective(attention)",
        "full": "recompute = full",
    }
    found = [
        Series(
            name,
            [
                account(llama("dp = 2  tp = 4", shard, 8, seq=seq, train=train)).activations
                for seq in lengths
            ],
        )
        for name, train in kinds.items()
    ]
    chart = Chart(
        "Saved activations of a microbatch, by what backward recomputes",
        "Llama 3 8B, tp = 4 with sequence parallelism, bf16, a sequence a microbatch",
        "tokens of a sequence",
        [f"{seq:,}" for seq in lengths],
        gib,
    )
    chart.lines(found, GIB)
    return chart.canvas


def sharded_state() -> Canvas:
    """State over ZeRO stages and dp."""
    places = [(zero, dp) for dp in (8, 64) for zero in range(4)]
    accounts = []
    for zero, dp in places:
        sections = f"state {{ zero {zero} over dp }}" if zero else ""
        accounts.append(account(llama(f"dp = {dp}", "batch over dp", dp, sections=sections)))
    parts = {
        "parameters": lambda it: sum(bucket.parameters + bucket.masters for bucket in it.buckets),
        "gradients": lambda it: sum(bucket.gradients for bucket in it.buckets),
        "optimizer": lambda it: sum(bucket.optimizer for bucket in it.buckets),
    }
    chart = Chart(
        "State of a rank, by ZeRO stage and degree of dp",
        "Llama 3 8B in bf16 with fp32 masters (with parameters), gradients and two averages",
        "stage of ZeRO, ranks of dp",
        [f"{zero}, dp {dp}" for zero, dp in places],
        gib,
    )
    chart.bars([Series(name, [part(it) for it in accounts]) for name, part in parts.items()], GIB)
    return chart.canvas


def _of_a_layer(program: Program) -> float:
    """Bytes that a microbatch saves in each layer."""
    layers = program.size("layers")
    return sum(
        kept.bytes * (kept.layers // layers)
        for kept in account(program).kept
        if kept.layers >= layers
    )


def tensor_parallel() -> Canvas:
    """Saved activations of a layer by tensor parallelism, with and without sequence parallelism."""
    degrees = (1, 2, 4, 8)
    rules = "batch over dp  vocab, heads, kv_heads, ffn over tp"
    found = []
    for name, shard in (("tp alone", rules), ("tp, seq over tp", f"{rules}  seq over tp")):
        programs = [llama(f"dp = {8 // tp}  tp = {tp}", shard, 8) for tp in degrees]
        found.append(Series(name, [_of_a_layer(it) for it in programs]))
    chart = Chart(
        "Saved activations of a layer, by tensor and sequence parallelism",
        "Llama 3 8B, bf16, 8,192 tokens; without `seq over tp` norms and sums are whole on"
        " each rank",
        "ranks of tp",
        [str(tp) for tp in degrees],
        gib,
    )
    chart.lines(found, MIB)
    return chart.canvas


def bubbles() -> Canvas:
    """The bubble over microbatches, by schedule."""
    counts = (4, 8, 16, 32, 64)
    chunks = {"interleaved_1f1b": 2}
    found = []
    for kind in ("1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        values = []
        for count in counts:
            rows = SCHEDULES[kind](4, count, chunks.get(kind))
            values.append(simulate(rows, Times.uniform(rows.stages)).bubble * 100)
        found.append(Series(kind, values))
    chart = Chart(
        "Time in which ranks of a pipeline wait, by schedule",
        "4 ranks; forward and both parts of backward take equally long, messages no time",
        "microbatches of a step",
        [str(count) for count in counts],
        lambda share: f"{share:.0f}%",
    )
    chart.lines(found, 1)
    return chart.canvas


def sent_by_axis() -> Canvas:
    """Bytes that each axis sends in a step."""
    mesh = "pp = 2  dp = 2  cp = 2  tp = 4"
    tensors = "vocab, heads, kv_heads, ffn over tp  seq over tp"
    shard = f"batch over dp  seq over cp as zigzag via ring  {tensors}  layers over pp"
    sections = "state { zero 1 over dp, cp }\npipeline { schedule = 1f1b }"
    program = llama(mesh, shard, 32, sections=sections)
    uses = {
        "parameters": "parameters",
        "gradients": "gradients",
        "activations": "activations",
        "stages": "between stages",
    }
    totals: dict[str, dict[str, float]] = {}
    for each in collectives(program):
        axes = axes_of(program, each)
        across = crosses(program, each.axes, get_launch(program).ranks_per_node)
        place = totals.setdefault(
            f"{axes}, {'across' if across else 'within'}", dict.fromkeys(uses, 0.0)
        )
        if each.use in place:
            place[each.use] += get_sent_bytes(each)
    kept = {name: values for name, values in totals.items() if sum(values.values()) > MIB}
    chart = Chart(
        "What a rank sends in a step, by axes, across nodes or within one",
        "Llama 3 8B on 32 GPUs, pp = 2, dp = 2, cp = 2, tp = 4; rank 0 of pp, ring attention"
        " over cp",
        "axes",
        list(kept),
        gib,
    )
    chart.bars(
        [Series(name, [values[use] for values in kept.values()]) for use, name in uses.items()], GIB
    )
    return chart.canvas


def five_axes() -> Canvas:
    """One layer under all five axes."""
    of = subject(ROOT / "docs" / "tutorial" / "10_five_axes.scale", proved=False)
    ranks = by_rank(of)
    return draw_model(
        model(of.program, busiest(ranks), ranks),
        {axis.name: at for at, axis in enumerate(of.program.axes)},
    )


def layer() -> Canvas:
    """One layer of Llama 3 70B with its shards and its collectives."""
    plan = subject(ROOT / "plans" / "llama3_70b.scale", proved=False)
    ranks = by_rank(plan)
    whole = model(plan.program, busiest(ranks), ranks)
    repeated = tuple(stretch for stretch in whole.stretches if stretch.dim)
    colours = {axis.name: number for number, axis in enumerate(plan.program.axes)}
    return draw_model(evolve(whole, stretches=repeated), colours)


def owners() -> Canvas:
    """The owners of a rank's memory over the sequence's length, for three sizes of Llama 3."""
    places: list[str] = []
    accounts: list[Account] = []
    for size in SIZES:
        for thousands in (8, 32, 128):
            accounts.append(account(sized_llama(size, thousands * 1024)))
            places.append(f"{thousands}k")
        places[-3] = f"{size} {places[-3]}"
    parts: dict[str, Callable[[Account], float]] = {
        "parameters": lambda memory: sum(it.parameters + it.masters for it in memory.buckets),
        "gradients": lambda memory: sum(it.gradients for it in memory.buckets),
        "optimizer": lambda memory: sum(it.optimizer for it in memory.buckets),
        "activations": lambda memory: memory.activations,
        "at the peak": lambda memory: memory.total - memory.state - memory.activations,
    }
    chart = Chart(
        "Memory of a rank by its owner, over the sequence's length",
        "Llama 3 on 64, 64 and 512 H100: tp = 8, seq over tp, ZeRO 3 over dp,"
        " recompute = full, bf16",
        "size of the model, tokens of a sequence",
        places,
        gib,
    )
    series = [Series(name, [part(memory) for memory in accounts]) for name, part in parts.items()]
    chart.bars(series, GIB)
    return chart.canvas


SIZES = {
    "8B": ("", 8),
    "70B": ("hidden = 8192  ffn = 28672  heads = 64  layers = 80", 8),
    "405B": ("hidden = 16384  ffn = 53248  heads = 128  layers = 126", 64),
}
"""By name, the dims in which a Llama 3 differs from 8B, and the ranks of dp."""


def sized_llama(size: str, length: int) -> Program:
    """Llama 3 of a size, tensor parallel in a node and ZeRO 3 over nodes."""
    dims, dp = SIZES[size]
    shard = "batch over dp  vocab, heads, kv_heads, ffn over tp  seq over tp"
    text = PLAN.format(
        nodes=dp,
        mesh=f"dp = {dp}  tp = 8",
        shard=shard,
        sections="state { zero 3 over dp }",
        seq=length,
        batch=dp,
        train="recompute = full",
    )
    if dims:
        text = text.replace(
            'use "models/llama.scale"', f'use "models/llama.scale" {{ dims {{ {dims} }} }}'
        )
    return compile_plan(Source(str(ROOT / "plans" / "picture.scale"), text))


def zigzag() -> Canvas:
    """The work of causal attention on four ranks, for contiguous and for zigzag positions."""
    ranks, side, left, top = 4, 12, 40, 64
    chunks = 2 * ranks
    layouts = {
        "contiguous": [chunk // 2 for chunk in range(chunks)],
        "zigzag": [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)],
    }
    canvas = Canvas(WIDTH)
    canvas.words(12, 18, "Causal attention over four ranks: who computes which blocks", "head")
    canvas.words(
        12, 34, "rows are queries, columns are keys; a block's colour is its rank", "muted"
    )
    for number, (name, owner) in enumerate(layouts.items()):
        x = left + number * (WIDTH / 2 - 10)
        canvas.words(x, top - 8, f"as {name}")
        blocks = [0] * ranks
        for query in range(chunks):
            for key in range(query + 1):
                colour = owner[query]
                blocks[colour] += 1
                canvas.box(
                    x + key * side * 1.6,
                    top + query * side * 1.6,
                    side * 1.5,
                    side * 1.5,
                    f"s{colour}",
                )
        for rank, count in enumerate(blocks):
            y = top + 12 + rank * 22
            canvas.box(x + 180, y - 9, 10, 10, f"s{rank}")
            canvas.words(x + 196, y, f"rank {rank}: {count} blocks")
    return canvas


PICTURES: dict[str, Callable[[], Canvas]] = {
    "collectives": draw_collectives,
    "owners": owners,
    "zigzag": zigzag,
    "saved_activations": saved_activations,
    "sharded_state": sharded_state,
    "tensor_parallel": tensor_parallel,
    "bubbles": bubbles,
    "sent_by_axis": sent_by_axis,
    "five_axes": five_axes,
    "layer": layer,
}


def picture(name: str) -> str:
    """The text of a picture's file."""
    make = PICTURES[name]
    return make().file(str(make.__doc__).rstrip("."), MARK)


if __name__ == "__main__":
    for name in PICTURES:
        (ROOT / "docs" / "pictures" / f"{name}.svg").write_text(picture(name), encoding="utf-8")
