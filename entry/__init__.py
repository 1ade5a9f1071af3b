"""scalec as a library: `scalec.compile(text)`, `scalec.plan(path)`; docs/library.md describes it.

Nothing is imported before a name is used: the programs that scalec writes import `scalec.runtime`
alone.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .library import Diagnostic, OutputError, Plan, PlanError, compile, plan

__all__ = ["Diagnostic", "OutputError", "Plan", "PlanError", "compile", "plan"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module `scalec` has no attribute `{name}`")
    from . import library

    return getattr(library, name)


def __dir__() -> list[str]:
    return [*__all__]
