"""The command `explain`: the memory, the collectives or the time of a plan, or the meaning of a
code.
"""

import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .command import PLAN, Command, count, file_path, plan_path
from .compile import Plan, load
from .output import UsageError, put, show

if TYPE_CHECKING:
    from ..analysis.time.profile import Profile
    from ..analysis.time.report import Report
    from ..reports.chrome_trace import Event

TOPIC = "topic"
"""The argument that is a topic, a value or a code."""

TOPICS = ("memory", "collectives", "time")
FORMS = ("json", "lines", "critical", "against")
OF_TIME = (*FORMS, "csv", "trace", "no_advice")
"""The options of `explain time`: forms of its report, files beside it, and a part to leave out."""


def explain(options: Namespace) -> None:
    """`scalec explain memory | collectives | time | VALUE PLAN`, `scalec explain CODE`."""
    from ..reports.explain import explain_code, explain_collectives, memory
    from ..reports.summary import largest_bucket
    from ..syntax.codes import get_codes

    of_program = {"memory": memory, "collectives": explain_collectives}
    topic, path, code = options.topic, options.plan, options.topic.upper()
    _check(options, TOPICS)
    if topic == "time":
        _time(_plan_at_size(load(path), options.size), options)
    elif topic in of_program:
        plan = _plan_at_size(load(path), options.size)
        parts = of_program[topic](plan.program), largest_bucket(plan.program, plan.model)
        show("\n\n".join(filter(None, parts)))
    elif path:
        _value(_plan_at_size(load(path), options.size), topic)
    else:
        assert code in get_codes(), "explain: neither a topic nor a code"
        show(explain_code(code))


def _plan_at_size(plan: Plan, size: int | None) -> Plan:
    """The plan at another size of an elastic axis; unchanged where `size` is None.

    UsageError where it has no axis of this size.
    """
    if size is None:
        return plan
    from ..analysis.elastic import alternatives, at_size, elastic_axis, sizes

    axis = elastic_axis(plan.program)
    if not axis:
        raise UsageError("`--size` goes with a plan of several sizes, as `mesh { dp = 4..8 }`")
    possible = sizes(plan.program)
    if size not in possible:
        raise UsageError(f"`{axis.name}` of this plan is {alternatives(possible)}")
    return Plan(plan.source, at_size(plan.model, size), at_size(plan.program, size))


def _value(plan: Plan, name: str) -> None:
    """Prints the placement of a value.  UsageError where the plan has no value of this name."""
    from ..analysis.communication import places
    from ..analysis.hardware import hardware
    from ..analysis.time.op_rows import OpRow, op_rows
    from ..reports.value import explain_value, names_of
    from ..syntax.diagnostics import did_you_mean
    from ..syntax.source import is_ir
    from ..tuning.lowering import lower

    if is_ir(plan.source.text):
        raise UsageError("a value is explained by its plan, not by IR text")
    names = names_of(plan.model)
    if name not in names:
        topics = "`memory`, `collectives`, `time`, a code such as `E0510`"
        near = (
            did_you_mean(name, names)
            or f"it explains {topics}, or a value or parameter of the plan"
        )
        raise UsageError(f"the plan has no value `{name}`: {near}")
    worked = lower(plan.model, "propagate")
    gpu, rows = hardware(plan.program), dict[str, OpRow]()
    if gpu:
        for rank in places(plan.program) if plan.program.pipeline else (None,):
            rows |= {row.name: row for row in op_rows(plan.program, gpu, rank)}
    show(explain_value(name, worked, lower(worked, "insert_collectives"), plan.program, rows))


def _check(options: Namespace, topics: tuple[str, ...]) -> None:
    """A topic goes with a plan, a code without; some options go with one topic."""
    from ..syntax.codes import get_codes
    from ..syntax.diagnostics import did_you_mean

    topic, plan = options.topic, options.plan
    is_code = topic.upper() in get_codes()
    # a word before a plan is taken for a value of the plan
    if topic not in topics and not is_code and not (plan and plan.is_file()):
        help = did_you_mean(topic, (*topics, *get_codes())) or (
            "it takes `memory`, `collectives`, `time`, a value of the plan, or a code such as"
            " `E0510`"
        )
        raise UsageError(f"cannot explain `{topic}`: {help}")
    if options.size and not plan:
        raise UsageError("`--size` goes with a plan")
    if is_code and plan:
        raise UsageError(f"`scalec explain {topic}` takes no plan")
    if not is_code and not plan:
        raise UsageError(f"`scalec explain {topic}` needs a plan")
    for name in OF_TIME:
        if topic != "time" and getattr(options, name):
            option = name.replace("_", "-")
            raise UsageError(f"`--{option}` goes with `scalec explain time`, not with `{topic}`")


def _time(plan: Plan, options: Namespace) -> None:
    """The time of a step, where the speed of the plan's GPU is known, and files beside it."""
    from ..analysis.time.report import with_ops

    forms = [form for form in FORMS if getattr(options, form)]
    if len(forms) > 1:
        raise UsageError(f"--{forms[0]} and --{forms[1]} exclude each other: choose one")
    if options.against and not (options.trace or options.csv):
        show(_against(plan, options.against))
        return
    report = with_ops(report_of(plan))
    if options.trace:
        from ..analysis.time.events import events_of
        from ..reports.time_trace import MARK, time_trace

        beside = load_recorded_steps(options.against) if options.against else ()
        text = time_trace(report.program, events_of(report.program, report.on), beside)
        put(options.trace, text, "trace", MARK, sys.stderr)
    if options.csv:
        from ..reports.op_times import HEADER, as_csv

        put(options.csv, as_csv(report.ops), "csv", ",".join(HEADER), sys.stderr)
    if options.against:
        show(_against(plan, options.against))
    else:
        show(_report_text(report, plan, options))


def _report_text(report: "Report", plan: Plan, options: Namespace) -> str:
    """The report as a table of ops or of the critical path, or with advice, as text or JSON."""
    from ..reports.op_times import critical, lines
    from ..syntax.source import is_ir

    if options.lines:
        return lines(report.ops)
    if options.critical:
        from ..analysis.time.critical_path import critical_path

        return critical(critical_path(report.program, report.on))
    if not options.no_advice and not is_ir(plan.source.text):
        from ..tuning.advice import make_report_with_advice

        report = make_report_with_advice(report, plan.model, plan.source)
    if options.json:
        import json

        from ..analysis.time.report import as_json

        return json.dumps(as_json(report), indent=2)
    from ..reports.time import time

    return time(report)


def _against(plan: Plan, folder: Path) -> str:
    """The steps that a run profiled, by plan line.

    Beside the prediction, if they ran on the device of the plan.
    """
    from ..analysis.memory import account
    from ..analysis.time import get_expected_report
    from ..analysis.time.profile import beside, ranks_at
    from ..reports.profile import table

    prediction = get_expected_report(plan.program)
    ranks = ranks_at(plan.program, prediction.step.rank if prediction else None)
    profile = load_profile(folder, ranks)
    if profile.device != account(plan.program).device:
        prediction = None
    return table(profile, beside(profile, prediction.step if prediction else None), prediction)


NOT_OURS = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors in reading a file that no run has written."""

TRACE = re.compile(r"rank(\d+)\.json")
"""The name of the trace of a rank."""


def load_recorded_steps(folder: Path) -> "list[Event]":
    """A step of each rank whose trace lies in the folder.  Raises UsageError."""
    from ..reports.time_trace import get_recorded_step

    events: list[Event] = []
    for path in sorted(folder.glob("rank*.json")):
        rank = TRACE.fullmatch(path.name)
        if not rank:
            continue
        try:
            events += get_recorded_step(int(rank[1]), path.read_text(encoding="utf-8"))
        except NOT_OURS:
            raise UsageError(
                f"`{path}` is no trace that a run of this scalec has recorded"
            ) from None
    if not events:
        raise UsageError(
            f"`{folder}` has no trace: train with SCALEC_PROFILE={folder}, then name it here"
        )
    return events


def load_profile(folder: Path, ranks: list[int]) -> "Profile":
    """The profile in a folder, of these ranks if it has any of them.  Raises UsageError."""
    from ..analysis.time import profile

    try:
        result = profile.read_profile(folder, ranks)
    except NOT_OURS:
        raise UsageError(
            f"`{folder}` has sums of a profile that no run of this scalec wrote"
        ) from None
    if result is None:
        raise UsageError(
            f"`{folder}` has no profile: train with SCALEC_PROFILE={folder}, then name it here"
        )
    return result


def report_of(plan: Plan) -> "Report":
    """The time of a step of a plan.  UsageError where the speed of its GPU is not known."""
    from ..analysis.hardware import hardware
    from ..analysis.time.report import report
    from ..config.gpus import GPUS
    from ..syntax.diagnostics import listing

    gpu = hardware(plan.program)
    if gpu is None:
        help = f'to name one of {listing(GPUS)}, or a file of measured figures, `hardware = "…"`'
        raise UsageError(f"the time of a step needs `cluster {{ gpu = … }}` {help}")
    return report(plan.program, gpu)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        TOPIC,
        metavar="TOPIC",
        help="memory, collectives, time, a value of the plan, or a code such as E0510",
    )
    parser.add_argument(
        "plan", type=plan_path, nargs="?", metavar="PLAN", help=f"{PLAN}; not for a code"
    )
    help = "the size of an axis with a range, such as dp = 4..8 (default: the largest)"
    parser.add_argument("--size", type=count, metavar="N", help=help)
    parser.add_argument("--json", action="store_true", help="time: print JSON")
    parser.add_argument("--lines", action="store_true", help="time: print a table of all ops")
    parser.add_argument("--csv", type=file_path, metavar="FILE", help="time: write all ops as CSV")
    help = "time: print which ops make the step as long as it is, and how much slower others may be"
    parser.add_argument("--critical", action="store_true", help=help)
    help = "time: write the step as a trace for ui.perfetto.dev"
    parser.add_argument("--trace", type=file_path, metavar="FILE", help=help)
    help = (
        "time: compare it by plan line with steps that a run wrote to this folder, its"
        " SCALEC_PROFILE"
    )
    parser.add_argument("--against", type=file_path, metavar="FOLDER", help=help)
    help = "time: do not try plans with one setting changed, which takes longest"
    parser.add_argument("--no-advice", action="store_true", help=help)


COMMAND = Command(
    explain,
    _arguments,
    "memory: peak memory of one rank, where in the step it occurs, and saved activations by op"
    " and plan line;\n"
    "whether it fits the GPU named in the plan's cluster.\n"
    "collectives: the collectives of a step, where and how often they run, and the bytes a"
    " rank sends,\n"
    "within a node and across nodes.\n"
    "time: the seconds of a step on the GPUs of the plan's cluster, on what and at which lines"
    " they are spent,\n"
    "tokens/s/GPU and MFU; what limits it, and which plans with one setting changed take less.\n"
    "A value or parameter of the plan: the rules that placed it and those that lost, its"
    " coercions, bytes and time.\n"
    "A code such as E0510: its meaning, with a wrong and a right plan.",
    "scalec explain memory plans/llama3_405b.scale",
)
