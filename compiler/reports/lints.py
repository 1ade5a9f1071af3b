"""Warnings of what compiles and is hardly meant.

Purpose: one function of a program, which `compile`, `run` and `check` show.
Non-goals: mistakes (`passes`), and what does not fit a GPU (`memory.capacity`).
"""

from collections.abc import Iterator

from ..ir import STATES, Program, types, walk
from ..ops import OPS
from ..syntax.diagnostics import Diagnostic, Note


def advice(program: Program) -> Iterator[Diagnostic]:
    """The warnings for a program."""
    yield from _answers_in_sight(program)
    yield from _reduced_once(program)
    yield from _one_turn_again(program)
    yield from _reserve_of_nothing(program)
    yield from _never_at_peak(program)
    yield from _ids_out_of_reach(program)
    yield from _nothing_gathered(program)


def _reserve_of_nothing(program: Program) -> Iterator[Diagnostic]:
    """A reserve, where no GPU is named of whose memory it would be a part."""
    if program.cluster.reserve is not None and not program.cluster.gpu:
        span = program.cluster.spans.get("reserve", program.region.span)
        yield Diagnostic("W0916", "the cluster has no GPU with such a reserve", span, help="name it: `gpu = h100_sxm`")


def _reduced_once(program: Program) -> Iterator[Diagnostic]:
    """Gradients that each microbatch is to reduce, where stages reduce theirs when they end."""
    pipeline, state = program.pipeline, next((state for state in program.state if state.gradients), None)
    if pipeline and state:
        kinds = ", ".join(kind for kind in STATES if kind != "gradients" and getattr(state, kind))
        yield Diagnostic(
            "W0902",
            "stages of a pipeline keep whole gradients, and reduce them once a step",
            pipeline.settings.spans.get("schedule", program.region.span),
            "not in each microbatch",
            (
                Note(
                    None,
                    f"weights are gathered once a step too{', and freed when a stage ends' * bool(state.parameters)}",
                ),
            ),
            f"write `{kinds} over {', '.join(state.gradients)}`, which is what is done",
        )


def _answers_in_sight(program: Program) -> Iterator[Diagnostic]:
    """Attention to later tokens, where labels are the tokens that follow."""
    data = program.train.data
    if data.masked is not None:
        return
    for op in walk(program.region.body):
        if op.kind == "attention" and OPS[op.kind].get(op, "mask") == "full":
            yield Diagnostic(
                "W0902",
                "each token is to predict the next one, which it sees",
                op.span,
                "attention to all tokens",
                (Note(data.spans["kind"], "labels are the tokens that follow"),),
                "hide what is to be predicted, `masked = 15%  mask_token = …`, or write `mask=causal`",
            )
            return


def _one_turn_again(program: Program) -> Iterator[Diagnostic]:
    """Of every n turns the first is done again, where there are fewer than n; of 2, a part of a repeat may have one."""
    again = program.train.recompute
    for name in again.names if again.word == "every" and again.number > 2 else ():
        if (turns := program.size(name)) < again.number:
            kept = f"{turns - 1} of {turns} turns" if turns > 1 else "no turn"
            span = program.train.spans["recompute"]
            help = f"write `every(2, {name})`, which does half of them again, or `recompute = full`"
            message = f"of every {again.number} turns of `{name}` one is done again, and there are {turns}"
            yield Diagnostic("W0903", message, span, f"keeps {kept}", help=help)


def _never_at_peak(program: Program) -> Iterator[Diagnostic]:
    """A warm-up as long as the run, or longer."""
    train, schedule = program.train, program.train.optimizer.schedule
    if schedule.warmup > train.steps or (schedule.kind == "cosine" and schedule.warmup == train.steps):
        message = f"the learning rate rises for {schedule.warmup:,} steps, and there are {train.steps:,}"
        label = "never at its peak" if schedule.warmup > train.steps else "never falls"
        notes = (Note(train.spans["steps"], "the steps of the run"),)
        help = f"write a `warmup` below {train.steps}, or more `steps`"
        yield Diagnostic("W0910", message, schedule.spans["warmup"], label, notes, help)


def _ids_out_of_reach(program: Program) -> Iterator[Diagnostic]:
    """Files of 16 bits a token, and a vocabulary of more."""
    data, found = program.train.data, types(program)
    tables = (found[op.inputs[1]].dims[0] for op in walk(program.region.body) if op.kind == "embedding")
    vocabulary = min(map(program.valid, tables), default=0)
    if data.kind == "tokens" and data.dtype == "uint16" and vocabulary > 2**16:
        message = f"ids of uint16 end at 65,535, and the vocabulary has {vocabulary:,}"
        help = "write `dtype = uint32` if the files have 32 bits a token"
        yield Diagnostic("W0911", message, data.spans["dtype"], "others never occur", help=help)


def _nothing_gathered(program: Program) -> Iterator[Diagnostic]:
    """Turns whose parameters are gathered ahead, where none are gathered in turns."""
    flow = program.flow
    if flow.prefetch == 1 or (any(state.parameters for state in program.state) and not program.pipeline):
        return
    why = "stages gather theirs at once" if program.pipeline else "no rule of `state` shares out `parameters`"
    message = "`prefetch` says how far ahead turns gather parameters, and none do"
    yield Diagnostic("W0912", message, flow.spans["prefetch"], why, help="leave it out")
