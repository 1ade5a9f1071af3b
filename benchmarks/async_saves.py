"""`.venv/bin/python benchmarks/async_saves.py`: saves beside training, beside torch's `async_save`,
on one process.

The same tensors: parameters, masters' and AdamW's state of a small Llama.  The stall is what the
training thread spends until it goes on, by the clock; a whole save lasts until its files are
synced.  Ours also looks for values that are not finite and hashes each tensor, which torch's does
not.  Both keep their copy in host memory from save to save.

Non-goals: several ranks, GPUs.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from emitted import Sizes, program
from measure import asked_quick, in_turns, ratio, table, where
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from scalec.runtime import Mesh
from scalec.runtime.checkpoint.background import Saver
from scalec.runtime.checkpoint.saver import Keep, own_boxes

SIZES = Sizes(
    vocab=4096, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1536, layers=4, seq=16, rows=1
)
Save = Callable[[], "Cost"]


class Cost(NamedTuple):
    """Seconds: of the stall, of the whole save, by the clock; and CPU time of the whole process
    for it.
    """

    stall: float
    whole: float
    cpu: float


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    _, state = program(SIZES, {}).build(Mesh({}))
    state.initialise(0)
    tensors = {name: box.tensor for name, box in own_boxes(state).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    with TemporaryDirectory() as folder:
        ours, torchs = Path(folder, "ours"), Path(folder, "torch")
        ours.mkdir()
        with Saver(ours, state, {}, Keep()) as saver:
            ways = {"ours": _ours(saver), "torch": _torchs(torchs, tensors)}
            costs = in_turns(ways, 2 if quick else 9)
            assert not [line for line in saver.news() if "cannot" in line]
    print(f"{where()}, one process")
    columns = ("", "stall", "whole save", "CPU time of it", "stall, ratio", "whole, ratio")
    table(
        f"A save of {size / 2**20:.0f} MiB",
        columns,
        [_row(name, costs[name], costs["torch"]) for name in costs],
    )


def _ours(saver: Saver) -> Save:
    steps = count(1)

    def begin() -> Callable[[], object]:
        saver.begin(next(steps))
        return saver.wait

    return lambda: _timed(begin)


def _torchs(folder: Path, tensors: dict[str, torch.Tensor]) -> Save:
    on_cpu = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(on_cpu)
    steps = count(1)

    def begin() -> Callable[[], object]:
        path = folder / f"step-{next(steps)}"
        saving: Any = async_save(tensors, checkpoint_id=path, no_dist=True, async_stager=stager)
        return saving.result

    return lambda: _timed(begin)


def _timed(begin: Callable[[], Callable[[], object]]) -> Cost:
    clock, cpu = perf_counter(), process_time()
    wait = begin()
    stall = perf_counter() - clock
    wait()
    return Cost(stall, perf_counter() - clock, process_time() - cpu)


def _row(name: str, own: list[Cost], of_torch: list[Cost]) -> tuple[str, ...]:
    times = (f"{median(each) * 1e3:,.0f} ms" for each in zip(*own, strict=True))
    stall = ratio([cost.stall for cost in own], [cost.stall for cost in of_torch])
    whole = ratio([cost.whole for cost in own], [cost.whole for cost in of_torch])
    return (name, *times, stall, whole)


if __name__ == "__main__":
    main()
