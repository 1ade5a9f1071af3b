"""A configuration whose every field is accounted for.

Purpose: fields by name, each with its place in the file; what no one took is an error.
Non-goals: what fields mean (`families`).
"""

import json
import re
from typing import Any, TypeGuard, cast

from ..diagnostics import Diagnostic, Diagnostics, PlanError
from ..limits import check
from ..source import Source, Span

ELSEWHERE = frozenset(
    """
    _name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id cache_implementation output_attentions
    output_hidden_states return_dict return_dict_in_generate summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class transformers_version
    use_cache
    """.split()
)
"""Fields about tokens, files, generation and classification, which training of a decoder does not ask for."""


class Config:
    """The fields of a configuration.  Raises PlanError where the text is none."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found = Diagnostics()
        self.left_out: dict[str, float] = {}
        self._left = _fields(source)

    def take(self, name: str, default: Any) -> Any:
        """The field, which is then accounted for; `default` where the file leaves it out or says null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the file has the field, and nobody took it."""
        return self._left.get(name) is not None

    def must_not_be_null(self, name: str) -> None:
        """A field of which a plan cannot express the absence."""
        if self._left.get(name, "") is None:
            self.wrong(name, f"`{name}` is `null`, which this model has not", "a plan is written for a number")

    def number(self, name: str, default: float | None = None) -> float:
        """A field that is a positive number; without default it has to be there."""
        value = self.take(name, default)
        if value is None:
            self.wrong(name, f"`{name}` is missing")
        elif not is_number(value):
            self.wrong(name, f"`{name}` is `{json.dumps(value)}`, not a positive number")
        return value if is_number(value) else 1

    def table(self, name: str) -> dict[str, Any]:
        """A field that holds fields, empty if it is not there."""
        value = self.take(name, {})
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
        self.wrong(name, f"`{name}` is `{json.dumps(value)}`, which holds no fields")
        return {}

    def must_be(self, name: str, *values: object) -> None:
        """A field that a plan expresses with these values alone; left out, it has the first."""
        value = self.take(name, values[0])
        if value not in values:
            shown = " or ".join(f"`{json.dumps(each)}`" for each in values)
            self.wrong(
                name, f"`{name}` is `{json.dumps(value)}`, which this model has not", f"a plan is written for {shown}"
            )

    def leave_out(self, name: str, default: float) -> None:
        """A field of training, not of the model; the plan says that it is left out, unless it is 0."""
        if value := self.take(name, default):
            self.left_out[name] = value

    def wrong(self, name: str, message: str, help: str = "") -> None:
        """Adds a mistake at a field."""
        self.found.error("E0801", message, self.span(name), help=help)

    def span(self, name: str) -> Span:
        """Where the field stands; the file as a whole if it does not."""
        for number, line in enumerate(self.source.text.split("\n"), 1):
            if match := re.search(rf'"{re.escape(name)}"\s*:', line):
                return Span(self.source.path, number, match.start() + 1, number, match.end(), self.source.text)
        return self.source.whole()

    def check(self) -> None:
        """Raises PlanError with all that was found, every field that nobody took among it."""
        for name in self._left:
            if name not in ELSEWHERE:
                self.wrong(name, f"no plan expresses `{name}`", "take it out if the model is the same without")
        self.found.check()


def is_number(value: object) -> TypeGuard[float]:
    """Whether a field is a positive number within the bounds of plans."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**48


def _fields(source: Source) -> dict[str, Any]:
    check(source)
    try:
        content: object = json.loads(source.text)
    except ValueError as error:
        raise _unreadable(source, str(error)) from None
    if not isinstance(content, dict):
        raise _unreadable(source, "it holds no fields")
    return cast("dict[str, Any]", content)


def _unreadable(source: Source, why: str) -> PlanError:
    return PlanError([Diagnostic("E0802", f"this is no configuration: {why.lower()}", source.whole())])
