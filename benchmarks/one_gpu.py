"""`.venv/bin/python benchmarks/one_gpu.py`: everything that one GPU can show, each table as soon as
it is there.

- rates: what torch's products and backends of attention reach, in the shapes of Llama 8B
- kernels: each beside torch eager, torch.compile and a copy of as many bytes
- attention: ours beside torch's
- experts: rows of a mixture beside a copy, products by expert beside a dense one
- head: head and loss of 128,256 classes, with and without logits: peak memory and time
- step: Llamas of 1B, 3B and 8B in shape at 4k and 8k tokens, as emitted programs and in plain torch

Bars: kernels at 85% of the copy; the fused head at a tenth of the memory and 1.1 times the time;
the step at 1.02 times the time and 0.8 times the memory of plain torch with torch.compile.  Tables
go to `--out` too, for RESULTS.md.  Without a GPU it ends with status 1, but for `--cpu-check`: toy
sizes, to see that it runs.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpu import Machine
from gpu_experts import EXPERTS, expert_rows
from gpu_kernels import KERNELS, kernel_rows
from gpu_products import ATTENTION, HEADS, attention_rows, head_rows
from gpu_rates import RATES, rate_rows
from gpu_steps import OPS, SEQS, SHAPES, STEPS, op_rows, step_rows
from gpu_steps import shapes as all_shapes
from measure import markdown

Rows = Iterator[tuple[str, ...]]


def main() -> None:
    """Runs the sections asked for."""
    options = _options()
    if not (options.cpu_check or torch.cuda.is_available()):
        sys.exit(
            "error: this is measured on a GPU, and this machine has none; --cpu-check sees"
            " whether it runs"
        )
    machine = Machine(
        torch.device("cpu" if options.cpu_check else "cuda"), options.cpu_check, options.repeats
    )
    shapes = options.shapes.split(",") if options.shapes else all_shapes(machine)
    sections: dict[str, list[tuple[str, Sequence[str], Callable[[], Rows]]]] = {
        "rates": [("What torch reaches, medians", RATES, lambda: rate_rows(machine))],
        "kernels": [("Kernels, medians", KERNELS, lambda: kernel_rows(machine))],
        "attention": [("Causal attention, medians", ATTENTION, lambda: attention_rows(machine))],
        "experts": [("A mixture of experts, medians", EXPERTS, lambda: expert_rows(machine))],
        "head": [("Head and loss, forward and backward", HEADS, lambda: head_rows(machine))],
        "step": [
            (
                f"A training step, {shape}",
                STEPS,
                lambda shape=shape: step_rows(machine, shape, options.seqs),
            )
            for shape in shapes
        ],
        "ops": [("Where a step's time goes", OPS, lambda: op_rows(machine, shapes[0]))],
    }
    chosen = options.only.split(",") if options.only else [*sections]
    if unknown := {*chosen} - {*sections}:
        sys.exit(f"error: no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    _say(f"{machine}; medians of {machine.repeats}", options.out)
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: there was not enough time"))
    for name in chosen:
        for title, columns, made in sections[name]:
            rows: list[tuple[str, ...]] = []
            try:
                for row in made():
                    print("  ".join(filter(None, row)), file=sys.stderr, flush=True)
                    rows.append(row)
            finally:  # what was measured before a failure, or before time was up
                _say(markdown(title, columns, rows), options.out)
            failed += sum("failed: " in cell for row in rows for cell in row)
    sys.exit(f"error: {failed} rows failed" if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="A,B",
        help="these sections: rates, kernels, attention, experts, head, step, ops",
    )
    parser.add_argument(
        "--shapes",
        default="",
        metavar="A,B",
        help=f"of the steps: {', '.join(SHAPES)}; by default all",
    )
    parser.add_argument(
        "--seqs", type=_numbers, default=SEQS, metavar="N,N", help="tokens of a sequence in steps"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="calls of which medians are taken"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="Markdown is appended to this file too"
    )
    parser.add_argument(
        "--cpu-check", action="store_true", help="toy sizes on the CPU: whether it runs"
    )
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _say(text: str, out: Path | None) -> None:
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(f"{text}\n")


if __name__ == "__main__":
    main()
