"""A training step of Llamas of 1B, 3B and 8B in shape: emitted programs beside plain torch, one
after the other.

All begin with the same parameters and see the same tokens; their losses after all steps stand in
the table.  Plain torch is `plain.Llama` with scaled_dot_product_attention, float32 parameters under
autocast, a residual stream in bfloat16 and fused AdamW; with torch.compile the whole of forward and
loss is one graph.  Emitted programs compute with bfloat16 copies of float32 masters.  FLOP of a
token: 6 for each parameter but the embedding's, and 6 · layers · heads · head_dim · seq for causal
attention, which is half of s²; what is computed again counts nothing.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, cast

import emitted
import plain
import torch
from emitted import Sizes
from gpu import GIB, Machine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from scalec.runtime import Mesh, compile_each

Step = Callable[[], Tensor]
STEPS = (
    "shape",
    "tokens",
    "program",
    "step",
    "beside compiled",
    "tokens/s",
    "MFU",
    "peak memory",
    "account",
    "loss",
)
OPS = ("program", "kernels", "time", "share")
WARM_UP, REPEATS = 3, 10
TOKENS = 8192
SEQS = (4096, 8192)
VOCAB = 128256
SHAPES = {
    "1B": Sizes(
        vocab=VOCAB,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn=8192,
        layers=16,
        seq=4096,
        rows=1,
    ),
    "3B": Sizes(
        vocab=VOCAB,
        hidden=3072,
        heads=24,
        kv_heads=8,
        head_dim=128,
        ffn=8192,
        layers=28,
        seq=4096,
        rows=1,
    ),
    "8B": Sizes(
        vocab=VOCAB,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        layers=32,
        seq=4096,
        rows=1,
    ),
}
TOY = Sizes(
    vocab=256, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, layers=2, seq=32, rows=1
)
STATE = 18
"""Bytes of a parameter: master, gradient, two averages, copy; of plain torch as many, with what
autocast keeps.
"""
FOR_STATE = 0.56
"""The part of a GPU's memory that is for these; the rest is for activations, and logits of
plain torch.
"""
GPUS = {"B200": "b200", "H200": "h200", "H100": "h100_sxm", "A100": "a100_80gb"}
"""Names of GPUs as plans have them, by a word of the device's."""
GROUPS = {
    "inductor's": "triton_",
    "attention": "flash|fmha|attention|sdpa|^(forward|keys|queries|delta)_kernel|^merge_",
    "products": "gemm|cutlass|cublas|nvjet|xmma|addmm|::mm|::bmm",
    "optimizer": "adam|foreach|multi_tensor|accumulate_kernel",
    "loss": "nll|softmax|logit|cross_entropy|_parts|_gradient",
    "experts": "grouped|^group_|^regroup_|top_k|^router_|^sort_|^(dispatch|combine|spread)_kernel",
    "norms, gates, rotary positions": (
        "(rms|layer)_norm|norm_(for|back)ward|gate_(for|back)ward|rope"
    ),
    "copies and fills": "copy|memcpy|memset|fill|cat",
    "elementwise": "elementwise|reduce",
}
"""Words in names of kernels; a kernel belongs to the first that it has."""


@dataclass(frozen=True)
class Program:
    """A way to make a step: with which settings it is emitted, or plain torch."""

    name: str
    train: str = ""
    compiled: bool = False


PROGRAMS = (
    Program("plain torch"),
    Program("plain torch, torch.compile", compiled=True),
    Program("scalec, kernels = triton", "kernels = triton"),
    Program("scalec, kernels = triton, compile = on", "kernels = triton  compile = on"),
    Program("scalec, kernels = torch, compile = on", "kernels = torch  compile = on"),
)


def shapes(machine: Machine) -> list[str]:
    """All; of toy sizes there is one."""
    return [*SHAPES][: 1 if machine.toy else None]


def step_rows(
    machine: Machine, shape: str, seqs: Sequence[int] = SEQS
) -> Iterator[tuple[str, ...]]:
    """Rows of all programs, at each number of tokens of a sequence."""
    for seq in (TOY.seq,) if machine.toy else seqs:
        sizes, reduced = _sizes(machine, shape, seq)
        said = f"{shape}{f', {sizes.layers} of {SHAPES[shape].layers} layers' if reduced else ''}"
        beside = 0.0
        for program in PROGRAMS[1:] + PROGRAMS[:1]:  # what the others are compared with comes first
            cells, ms = _measured(machine, program, sizes, beside)
            beside = beside or ms
            yield (said, f"{sizes.rows} × {seq}", program.name, *cells)


def _measured(
    machine: Machine, program: Program, sizes: Sizes, beside: float
) -> tuple[tuple[str, ...], float]:
    """A row's cells, and the time of a step; 0 where it fails, as without memory for it."""
    try:
        step, account = _made(machine, program, sizes)
        for _ in range(WARM_UP):
            step()
        peak, ms = machine.peak_bytes(step), machine.milliseconds(step, REPEATS, cold=False)
        peak += _held(machine)
        loss = float(step())
    except Exception as error:  # of any kind: the other programs are still to be measured
        return (machine.failure(error), *[""] * 6), 0.0
    finally:
        step = None
        machine.clear()
    tokens = sizes.rows * sizes.seq / ms * 1e3
    mfu = f"{tokens * flop_of_token(sizes) / machine.peak:.1%}" if machine.peak else ""
    ratio = f"{ms / (beside or ms):.2f}×"
    memory = f"{peak / GIB:.2f} GiB", f"{account / GIB:.2f} GiB" if account else ""
    return (f"{ms:.1f} ms", ratio, f"{tokens:,.0f}", mfu, *memory, f"{loss:.4f}"), ms


def _held(machine: Machine) -> int:
    """Bytes that are there between steps."""
    return torch.cuda.memory_allocated() if machine.on_gpu else 0


def _sizes(machine: Machine, shape: str, seq: int) -> tuple[Sizes, bool]:
    """The sizes of a shape, with as many layers as there is memory for their state, and whether
    that is less.
    """
    if machine.toy:
        return TOY, False
    whole = replace(SHAPES[shape], seq=seq, rows=TOKENS // seq)
    most = torch.cuda.get_device_properties(0).total_memory * FOR_STATE / STATE
    layer, rest = _layer(whole), parameters(replace(whole, layers=0))
    layers = min(whole.layers, int((most - rest) / layer) // 2 * 2)
    return replace(whole, layers=layers), layers < whole.layers


def _layer(sizes: Sizes) -> int:
    s = sizes
    return s.hidden * (2 * s.heads * s.head_dim + 2 * s.kv_heads * s.head_dim + 3 * s.ffn + 2)


def parameters(sizes: Sizes) -> int:
    """Parameters of the whole model, whose head is its own."""
    return sizes.layers * _layer(sizes) + (2 * sizes.vocab + 1) * sizes.hidden


def flop_of_token(sizes: Sizes) -> float:
    """Operations of forward and backward."""
    products = parameters(sizes) - sizes.vocab * sizes.hidden
    return 6.0 * products + 6.0 * sizes.layers * sizes.heads * sizes.head_dim * sizes.seq


def _made(machine: Machine, program: Program, sizes: Sizes) -> tuple[Step, int]:
    """A program's step, and its peak by the account if it has one."""
    if program.train:
        module, account = _emitted(machine, program, sizes)
        model, state = _begun(machine, module)
        tokens, labels = (rows.to(machine.device) for rows in emitted.random_rows(sizes, seed=1))
        batch = emitted.batch(module, tokens, labels)
        return lambda: module.train_step(model, state, batch, 1e-4).loss, account
    return _plain(machine, program, sizes), 0


def _emitted(machine: Machine, program: Program, sizes: Sizes) -> tuple[ModuleType, int]:
    precision = "bf16" if machine.on_gpu else "fp32"
    name = torch.cuda.get_device_name() if machine.on_gpu else "H200"
    gpu = next((plans for word, plans in GPUS.items() if word in name), "")
    module, memory = emitted.accounted(sizes, f"precision = {precision}  {program.train}", gpu)
    cast(Any, module).compile_each = partial(compile_each, backend=machine.backend)
    return module, memory["peak"]["bytes"]


def _begun(machine: Machine, module: ModuleType) -> tuple[nn.Module, Any]:
    model, state = module.build(Mesh({}, machine.device))
    state.initialise(0)
    return model, state


def _plain(machine: Machine, program: Program, sizes: Sizes) -> Step:
    with machine.device:
        model = plain.Llama(sizes)
    model.wte.register_forward_hook(lambda *given: given[-1].to(machine.dtype))
    plain.load(model, _begun(machine, _emitted(machine, PROGRAMS[2], sizes)[0])[1].state_dict())
    machine.clear()
    optimizer, rows = plain.optimizer_of(model), emitted.random_rows(sizes, seed=1)
    tokens, labels = (each[0].to(machine.device) for each in rows)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(machine.device.type, torch.bfloat16, enabled=machine.on_gpu):
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    forward = machine.compile(loss_of) if program.compiled else loss_of
    for group in optimizer.param_groups:
        group["lr"] = 1e-4

    def step() -> Tensor:
        loss = forward(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), emitted.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def op_rows(machine: Machine, shape: str) -> Iterator[tuple[str, ...]]:
    """Time by group of kernels in one step at 4k tokens, of emitted programs and of compiled
    plain torch.
    """
    sizes, _ = _sizes(machine, shape, TOY.seq if machine.toy else 4096)
    for program in PROGRAMS[1:4]:
        name, times = f"{program.name}, {shape}", dict[str, float]()
        try:
            step, _ = _made(machine, program, sizes)
            for _ in range(WARM_UP):
                step()
            times = _by_group(machine, step)
        except Exception as error:  # of any kind: as in `_measured`
            yield (name, machine.failure(error), "", "")
        finally:
            step = None
            machine.clear()
        whole = sum(times.values())
        for group, us in sorted(times.items(), key=lambda pair: -pair[1]):
            yield (name, group, f"{us / 1e3:.2f} ms", f"{us / whole:.1%}")


def _by_group(machine: Machine, step: Step) -> dict[str, float]:
    """Microseconds of kernels in one step, or of ops on the CPU."""
    kind = ProfilerActivity.CUDA if machine.on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        step()
        if machine.on_gpu:
            torch.cuda.synchronize()
    times: dict[str, float] = {}
    for each in cast(Sequence[Any], profiled.key_averages()):
        us = each.self_device_time_total if machine.on_gpu else each.self_cpu_time_total
        times[group_of(each.key)] = times.get(group_of(each.key), 0.0) + us
    return {group: us for group, us in times.items() if us}


def group_of(kernel: str) -> str:
    """By its name."""
    return next(
        (group for group, words in GROUPS.items() if re.search(words, kernel, re.I)), "others"
    )
