"""The lines of `microbatches`, `train_step`, `eval_step` and `learning_rate` in a program of
torch alone.
"""

from collections.abc import Iterator, Mapping, Sequence

from ...ir import SEQUENCE, Arg, Program, base
from ..naming import DTYPES, literal
from ..target import placements
from . import staged
from .modules import zigzag_options
from .sharded import sync_lines


def input_expression(arg: Arg, program: Program) -> str:
    """How a rank has its part of an input of all microbatches."""
    type, name = arg.value.type, base(arg.value.name)
    seq_first = type.dims[0] == SEQUENCE
    arguments = ["mesh", name, "MICROBATCHES", placements(type, program), f"seq_first={seq_first}"]
    arguments += zigzag_options(program)
    microbatches = f"by_microbatch({', '.join(arguments)})"
    if program.pipeline:
        return staged.whole_batch(arg, microbatches)
    return microbatches


# ---- train_step


def train_lines(
    program: Program, inputs: Sequence[str], patterns: Mapping[str, str]
) -> Iterator[str]:
    """The lines of `train_step`."""
    is_scaled = program.train.precision == "fp16"
    if is_scaled:
        yield "scale = loss_scale(optimizer)"
    if program.pipeline:
        yield from staged.step_lines(True, is_scaled)
    else:
        yield from _microbatch_lines(program, inputs, patterns)
    yield from _gradient_lines(program)
    if is_scaled:
        yield "if num_tokens and loss.isfinite():"
        yield "    adapt_loss_scale(optimizer, grad_norm)"
    comment = "# or else the step changes nothing"
    yield f"if num_tokens and loss.isfinite() and grad_norm.isfinite():  {comment}"
    if clip := program.train.optimizer.clip:
        yield "    for gradient in gradients:"
        yield f"        gradient.mul_(min(1.0, {literal(clip)} / (grad_norm.item() + 1e-6)))"
    yield "    update(optimizer, lr)"
    yield "optimizer.zero_grad()"
    yield "return Metrics(loss, grad_norm, num_tokens)"


def _microbatch_lines(
    program: Program, inputs: Sequence[str], patterns: Mapping[str, str]
) -> Iterator[str]:
    """The lines that run forward and backward of all microbatches."""
    names = ", ".join(inputs)
    yield _count_valid(inputs)
    yield "losses: list[Tensor] = []"
    sync = [*sync_lines(program, patterns)]
    if sync:
        yield f"for number, ({names}) in enumerate(batch, start=1):"
    else:
        yield f"for {names} in batch:"
    for line in sync:
        yield f"    {line}"
    yield f"    loss_sum = model({names})"
    scale = " * scale" if program.train.precision == "fp16" else ""
    yield f"    (loss_sum / max(num_tokens, 1){scale}).backward()"
    yield "    losses.append(loss_sum.detach())"
    yield "loss = whole_sum(losses) / max(num_tokens, 1)"


def _count_valid(inputs: Sequence[str]) -> str:
    names = [name if name == "labels" else "_" for name in inputs]
    return f"num_tokens = count_valid([labels for {', '.join(names)} in batch])"


def _gradient_lines(program: Program) -> Iterator[str]:
    """The lines that reduce gradients, and make their norm."""
    sent = {program.reduce_dtype(bucket) for bucket in program.buckets}
    stored = {bucket.type.dtype for bucket in program.buckets}
    dtypes = [DTYPES[dtype] for dtype in sent - stored]
    if program.pipeline:
        yield f"gradients = model.gradients({', '.join(dtypes)})"
    else:
        yield f"gradients = reduced_gradients({', '.join(['model', *dtypes])})"
    if program.train.precision == "fp16":
        yield "for gradient in gradients:"
        yield "    gradient.div_(scale)"
    norm = "model.total_norm" if program.pipeline else "total_norm"
    yield f"grad_norm = {norm}(gradients)"


# ---- eval_step


def evaluation_lines(program: Program, inputs: Sequence[str]) -> Iterator[str]:
    """The lines of `eval_step`."""
    if program.pipeline:
        yield from staged.step_lines(backward=False)
    else:
        names = ", ".join(inputs)
        yield _count_valid(inputs)
        losses = f"[model({names}) for {names} in batch]"
        yield f"loss = whole_sum({losses}) / max(num_tokens, 1)"
    yield "return Metrics(loss, torch.zeros_like(loss), num_tokens)"


# ---- learning_rate


def learning_rate_doc(program: Program) -> str:
    """The docstring of `learning_rate`."""
    kind = program.train.optimizer.schedule.kind
    return f"The learning rate of a step, from 0: {kind}, after a warm-up."


def learning_rate_lines(program: Program) -> Iterator[str]:
    """The lines of `learning_rate`."""
    optimizer = program.train.optimizer
    schedule, peak = optimizer.schedule, literal(optimizer.lr)
    if schedule.warmup:
        yield f"if step < {schedule.warmup}:"
        yield f"    return {peak} * (step + 1) / {schedule.warmup}"
    if schedule.kind == "constant":
        yield f"return {peak}"
        return
    floor = literal(min(schedule.floor, optimizer.lr))
    yield f"done = (step - {schedule.warmup}) / max(1, steps - 1 - {schedule.warmup})"
    yield f"return {floor} + ({peak} - {floor}) * 0.5 * (1 + math.cos(math.pi * done))"
