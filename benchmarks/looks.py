"""`.venv/bin/python benchmarks/looks.py`: CPU time of the looks of `watch`, beside a step, on one
thread and one rank.

Told are the time of each look, and for copies and replay also ratios, which a busy machine changes
little: of hashing to copying the same bytes, and of a step that is run twice to a plain one.
"""

import importlib.util
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch

from scalec.compiler.cli import main as scalec
from scalec.runtime import Batch, Mesh, Metrics, TrainState
from scalec.runtime.debug.compare import Comparison
from scalec.runtime.debug.twice import CopyCheck, Replay
from scalec.runtime.train.finite import Finite

TIMES, STEPS = 5, 2000
PLAN = """
model mlp(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 1024  hidden = 512  ffn = 2048  layers = 6 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(rmsnorm(x, norm[hidden], 1e-5) @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
train {
  seq = 128  global_batch = 4  microbatch = 4  steps = 1
  optimizer adamw { lr = 1e-3  clip = 1.0 }
  data text { files = [python_stdlib] }
}
"""


def main() -> None:
    """Prints the least of some times."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        program = _program(Path(folder))
    model, state = program.build(Mesh({}))
    state.initialise(0)
    rows = torch.randint(256, (1, 4, 128))
    batch = Batch(rows, rows)
    step = min(
        _seconds(lambda: program.train_step(model, state, batch, 1e-3)) for _ in range(TIMES)
    )
    print(
        f"a step {step * 1e3:.0f} ms of CPU,"
        f" {sum(box.tensor.nbytes for box in state.boxes()) / 2**20:.0f} MiB of state"
    )
    _each_step(state)
    _hashes(program, model, state, batch)
    replay = Replay(state, program.train_step, Comparison(torch.device("cpu")))
    twice = min(
        _seconds(lambda: replay.step(1, model, batch, 1e-3, program.train_step, lambda: None))
        for _ in range(TIMES)
    )
    print(f"replay: a step that is run twice {twice * 1e3:.0f} ms, {twice / step:.2f} plain ones")


def _each_step(state: TrainState) -> None:
    """The looks of each step."""
    loss, tokens = torch.tensor(2.0), torch.tensor(512)
    finite, metrics = Finite(state), Metrics(loss, tokens, torch.tensor(1.0))
    looked = (
        min(
            _seconds(lambda: [finite.after(i, metrics) for i in range(STEPS)]) for _ in range(TIMES)
        )
        / STEPS
    )
    limits = (
        min(_seconds(lambda: [state.loss_limit(10.0) for _ in range(STEPS)]) for _ in range(TIMES))
        / STEPS
    )
    added = (
        min(
            _seconds(lambda: [state.losses.add(loss, tokens > 0) for _ in range(STEPS)])
            for _ in range(TIMES)
        )
        / STEPS
    )
    print(
        f"finite: {looked * 1e6:.0f} µs a step; "
        f"spikes: {limits * 1e6:.0f} µs for the limit, {added * 1e6:.0f} to add a loss"
    )


def _hashes(program: Any, model: Any, state: TrainState, batch: Batch) -> None:
    """The beginning of a step that is compared: all state is hashed once."""
    check = CopyCheck(model, state, program.PLAN.inputs, Comparison(torch.device("cpu")))
    boxes = [box.tensor for box in state.boxes()]
    hashed = min(_seconds(lambda: check.begin(batch)) for _ in range(TIMES))
    copied = min(_seconds(lambda: [each.clone() for each in boxes]) for _ in range(TIMES))
    size = sum(each.nbytes for each in boxes)
    print(
        f"copies: hashes {size / hashed / 1e9:.2f} GB/s, {hashed / copied:.1f} times a copy of"
        " the same bytes"
    )


def _program(folder: Path) -> Any:
    """The emitted program, as a module."""
    (folder / "mlp.scale").write_text(PLAN)
    with redirect_stdout(StringIO()):
        assert scalec(["compile", str(folder / "mlp.scale"), "-o", str(folder / "out")]) == 0
    spec = importlib.util.spec_from_file_location("emitted_mlp", folder / "out" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _seconds(do: Callable[[], object]) -> float:
    began = process_time()
    do()
    return process_time() - began


if __name__ == "__main__":
    main()
