"""The commands in the order of the help: a row each, with the module that has the command.

A module is imported when its command is called, so that `--help` and each command load only what
they need.
"""

from importlib import import_module
from typing import NamedTuple

from .command import Command


class Entry(NamedTuple):
    """A row: the command's name, its help in one line, its module, and its name there."""

    name: str
    help: str
    module: str
    value: str = "COMMAND"

    def load(self) -> Command:
        """The command; its module is imported now."""
        from .attrs_code import keep_code_of_attrs

        keep_code_of_attrs()  # before the module and what it imports define classes
        return getattr(import_module(self.module), self.value)


COMMANDS = (
    Entry("new", "write a first plan for this machine", "scalec.tools.new.command"),
    Entry("plans", "list the plans and models that come with scalec", "scalec.compiler.cli.plans"),
    Entry(
        "compile", "compile a plan to a training program", "scalec.compiler.cli.compile", "COMPILE"
    ),
    Entry(
        "run",
        "compile a plan and train it on this machine, or go on with its run",
        "scalec.compiler.cli.run",
    ),
    Entry("ir", "show the program between two passes", "scalec.compiler.cli.ir"),
    Entry("check", "check a plan for errors", "scalec.compiler.cli.compile", "CHECK"),
    Entry(
        "explain",
        "show the memory, the collectives or the time of a plan, why a value is placed so, or the"
        " meaning of a code",
        "scalec.compiler.cli.explain",
    ),
    Entry(
        "data",
        "make token ids of text, documents and conversations",
        "scalec.tools.data.command",
    ),
    Entry("diff", "show two plans side by side", "scalec.tools.diff.command"),
    Entry(
        "plan",
        "find the best plans of a model for a number of GPUs",
        "scalec.tools.planner.command",
    ),
    Entry(
        "calibrate",
        "measure this machine at the shapes of some plans",
        "scalec.tools.calibrate.command",
    ),
    Entry(
        "launch", "write the script that trains a plan on a cluster", "scalec.tools.launch.command"
    ),
    Entry("doctor", "look at the machines that are to train a plan", "scalec.tools.doctor.command"),
    Entry("schedule", "draw the pipeline schedule of a plan", "scalec.tools.schedule.command"),
    Entry(
        "report",
        "write a page that shows a plan, or two side by side",
        "scalec.tools.report.command",
    ),
    Entry("loads", "draw the loads of experts in a run", "scalec.tools.log.command", "LOADS"),
    Entry("log", "draw losses, norms and speed of runs", "scalec.tools.log.command", "LOG"),
    Entry(
        "convert",
        "convert checkpoints to torch.distributed.checkpoint and back",
        "scalec.tools.convert.command",
    ),
    Entry(
        "verify",
        "prove that a plan's sharded step is the single-device step",
        "scalec.compiler.cli.verify",
    ),
    Entry(
        "schema",
        "print the JSON Schema of a plan's settings, or of plan.json",
        "scalec.compiler.cli.schema",
    ),
    Entry("fmt", "format plans", "scalec.tools.formatter.command"),
    Entry(
        "lsp",
        "serve editors: diagnostics, hovers, completion and more",
        "scalec.tools.language_server.command",
    ),
    Entry(
        "completion",
        "print the script with which bash, zsh or fish completes scalec's command lines",
        "scalec.compiler.cli.completion",
    ),
    Entry("import", "write a plan for a Hugging Face model", "scalec.tools.importer.command"),
)
