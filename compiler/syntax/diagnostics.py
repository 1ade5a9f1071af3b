"""Diagnostics: errors and warnings about a plan, shown the way rustc does."""

import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from attrs import evolve, frozen

from .source import Span

CODES = {
    # files and syntax
    "E0101": "a file that cannot be read",
    "E0102": "a text beyond the limits of the language",
    "E0103": "unbalanced brackets",
    "E0104": "a syntax error",
    "E0105": "a string that does not end",
    "E0106": "a number that cannot be represented",
    "E0190": "IR text that cannot be read",
    # names
    "E0201": "an unknown name",
    "E0202": "a plan without a model",
    "E0203": "a plan with several models",
    "E0204": "a section given twice",
    "E0205": "a file that cannot be used",
    "E0206": "a model without a loss",
    "E0207": "a name that is taken",
    "E0208": "a parameter declared twice",
    "E0209": "a repeated parameter outside its repeat",
    "E0210": "a parameter without an initial value",
    "E0211": "an unknown distribution",
    "E0212": "something that the loss does not depend on",
    "E0213": "inputs other than tokens, labels and documents",
    "E0214": "a loss that is not a sum of token losses",
    "E0215": "a name that cannot be used",
    "E0216": "a parameter or a repeat over data",
    "E0217": "a signature or `module:function` that no user op can have",
    "E0218": "a function that does not exist",
    "E0219": "an index out of place",
    "E0220": "a value that no route can send, or that experts do not see",
    "E0221": "a module that cannot be copied",
    "E0222": "a function that is not what its `op` says",
    "E0224": "a loss that depends on tokens that it must not see",
    # dims and arithmetic
    "E0301": "not arithmetic on dims",
    "E0302": "arithmetic without a result",
    "E0303": "a dim that is not whole",
    "E0304": "a dim out of range",
    "E0305": "a carried value that changes its dims",
    "E0306": "operands that cannot be multiplied",
    "E0307": "dims that do not fit",
    "E0308": "a dim twice in one parameter",
    "E0309": "a dim that the model does not set",
    "E0310": "a batch that is not whole",
    "E0311": "query heads that key/value heads do not divide",
    "E0312": "dims that rope cannot rotate",
    "E0313": "a constant out of range",
    "E0314": "padding that would count",
    "E0315": "a branch that never or always runs",
    "E0316": "a choice of experts that cannot be made",
    # settings
    "E0401": "an unknown setting",
    "E0402": "a missing setting",
    "E0403": "a setting given twice",
    "E0404": "a value of the wrong type",
    "E0405": "a value out of range",
    "E0406": "a section of the wrong form",
    "E0407": "a group without parameters",
    "E0408": "a parameter in two groups",
    "E0409": "data for which the model has no input",
    "E0410": "an op or layers that cannot be recomputed",
    "E0411": "element types that contradict each other",
    "E0412": "a setting that does not work in a compiled layer",
    "E0413": "kernels that a GPU does not run",
    "E0414": "chunked logits without Triton kernels",
    "E0415": "an unknown GPU",
    "E0416": "a learning rate that rises where it should fall",
    "E0417": "padded rows of experts without a capacity",
    "E0418": "a file that does not describe hardware",
    "E0419": "memory that no recomputation reaches",
    "E0420": "a file of another format than the data's",
    # mesh and shard
    "E0501": "not an axis",
    "E0502": "not a rule",
    "E0503": "a rule for an unknown dim",
    "E0504": "a rule over an unknown axis",
    "E0505": "two dims over one axis",
    "E0506": "an axis that is not innermost",
    "E0507": "axes out of order",
    "E0508": "a rule that matches nothing",
    "E0509": "an axis that nothing uses",
    "E0510": "a dim that its axis does not divide",
    "E0511": "an axis that spans several nodes",
    "E0512": "a mesh of another size than the cluster",
    "E0513": "a repeat that cannot be split into stages",
    "E0514": "an unknown kind of state",
    "E0515": "state over an axis without data",
    "E0516": "kinds of state over different axes",
    "E0517": "impossible stages or schedule",
    "E0518": "a layout or strategy that does not apply",
    "E0519": "an override that does not say the order of axes",
    "E0520": "a range of sizes that an axis cannot have",
    # ops
    "E0601": "a dim that an op needs unsharded",
    "E0612": "rows of experts in uneven parts",
    "E0609": "query and key/value heads sharded differently",
    "E0602": "several results",
    "E0603": "not a tensor",
    "E0604": "an operator between tensors",
    "E0605": "an unknown op",
    "E0606": "wrong arguments",
    "E0607": "token ids and numbers confused",
    "E0608": "not one of the choices",
    "E0610": "not a fraction",
    "E0611": "weights dropped around a ring",
    "E0613": "a product of two activations",
    "E0614": "experts over axes with and without parts of the tokens",
    "E0615": "copies that would drift apart",
    # what the step computes
    "E0701": "a step that is not the single device's",
    "E0702": "plans that differ",
    "E0703": "output that is not the plan's",
    "E0705": "a step that cannot be proved",
    "E0706": "IR text that makes no program",
    "E0707": "a plan that torch alone cannot express",
    # configurations of other programs
    "E0801": "a model that no plan can express",
    "E0802": "not a configuration",
    "E0803": "a field that is missing or of the wrong type",
    "E0804": "fields that do not fit together",
    # warnings: the plan is compiled
    "W0901": "a step that does not fit its GPU",
    "W0902": "a bidirectional model that predicts the tokens that follow",
    "W0903": "a recompute interval longer than the repeat",
    "W0904": "ranks of a sequence with unequal work",
    "W0905": "experts with few rows of a microbatch",
    "W0906": "per-microbatch gradient reduction has no effect with pipeline stages",
    "W0907": "pipeline ranks that wait for a large share of the step",
    "W0910": "a warm-up as long as the run",
    "W0911": "token ids that files cannot hold",
    "W0912": "a setting without effect",
    "W0915": "unknown whether the plan fits a GPU",
    "W0916": "a memory reserve without a GPU",
}
"""The meaning of every code; codes with W are warnings."""


@frozen
class Note:
    """Something else worth knowing; with a span, another place that has to do with the mistake."""

    span: Span | None
    text: str


@frozen
class Diagnostic:
    """One mistake, or a warning."""

    code: str
    message: str
    span: Span
    label: str = ""
    notes: tuple[Note, ...] = ()
    help: str = ""

    @property
    def severity(self) -> str:
        """Whether it is an error or a warning."""
        return "warning" if self.code.startswith("W") else "error"

    def __str__(self) -> str:
        return render(self)


class PlanError(Exception):
    """The plan is wrong; holds at least one diagnostic, ordered by position."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        assert diagnostics, "diagnostics: a PlanError without a diagnostic"
        self.diagnostics = tuple(sorted(diagnostics, key=lambda mistake: _position(mistake.span)))
        super().__init__(*self.diagnostics)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.diagnostics))


def _position(span: Span) -> tuple[str, int, int]:
    """The key that sorts places: by file, line and column."""
    return span.path, span.line, span.column


def wrong(
    code: str,
    message: str,
    span: Span,
    label: str = "",
    help: str = "",
    *,
    notes: Sequence[Note] = (),
) -> PlanError:
    """The error of one mistake."""
    return PlanError([Diagnostic(code, message, span, label, tuple(notes), help)])


def relocate(mistake: Diagnostic, text: str) -> Diagnostic:
    """The mistake with its places in another text that has the same lines and columns."""
    notes: list[Note] = []
    for note in mistake.notes:
        notes.append(evolve(note, span=note.span and evolve(note.span, text=text)))
    return evolve(mistake, span=evolve(mistake.span, text=text), notes=tuple(notes))


class Unknown(Exception):
    """Something cannot be known, because of a mistake that has been reported."""


FOLLOWS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("E0201", "E0206", "E0207", "E0219", "E0220", "E0605", "E0514"), ()),
    **dict.fromkeys(("E0311", "E0312", "E0314", "E0316"), ()),
    **dict.fromkeys(("E0402", "E0409", "E0503", "E0504", "E0519"), ()),
    "E0508": ("model", "statements"),
    **dict.fromkeys(("E0310", "E0507", "E0510", "E0511", "E0512", "E0609"), ("mesh",)),
    **dict.fromkeys(("E0509", "E0515"), ("shard",)),
    **dict.fromkeys(("E0412", "E0612", "E0615"), ("train",)),
    "E0517": ("shard", "model"),
    "E0202": ("model",),
    "E0212": ("loss",),
    "E0410": ("model",),
}
"""Mistakes that may follow from others, and the sections, or other parts of a plan, that each of
them rests on.

Such a mistake is not reported where one of its words, or a part of these sections, is in doubt.
"""

UNUSED = ("E0212", "E0410", "E0508", "E0509", "E0515")
"""Mistakes that say that nothing uses something, or that there is no such op."""

OF_A_CONSTANT = ("E0312", "E0313")
"""Mistakes that are reported once, however many ops take the constant."""

OF_A_NAME = ("E0201", "E0503")
"""Mistakes that are reported once for a name, with the other places where the name is."""

PLACES = 3
"""The most other places that are shown."""

_PART = re.compile("_[0-9]+(?=`)")
_QUOTED = re.compile("`[^`]*`")
_NAME = re.compile(r"[A-Za-z_]\w*")


class Diagnostics:
    """Collects the mistakes that one step finds, and the words whose meaning is in doubt because of
    them.

    `in_part` are sections with a part that is in doubt, and `used` are words that may have a use in
    such a part.  `count` is the number of mistakes, unreported ones too.
    """

    def __init__(self) -> None:
        # by a key that is the same for all parts of a repeat with branches
        self._mistakes: dict[object, Diagnostic] = {}
        self._elsewhere: dict[object, list[Span]] = {}
        self.count = 0
        self.doubtful: set[str] = set()
        self.in_part: set[str] = set()
        self.used: set[str] = set()

    def error(
        self,
        code: str,
        message: str,
        span: Span,
        label: str = "",
        *,
        notes: Sequence[Note] = (),
        help: str = "",
    ) -> None:
        """Adds one mistake."""
        assert code in CODES, f"diagnostics: {code} is not in the table"
        self.tell(Diagnostic(code, message, span, label, tuple(notes), help))

    def doubt(self, *words: str, section: str = "") -> None:
        """Puts the meaning of words in doubt, and a part of a section."""
        self.doubtful.update(words)
        self.in_part.update(filter(None, [section]))

    def tell(self, mistake: Diagnostic) -> None:
        """Adds one mistake, unless an equal one was added, or it may follow from others."""
        self.count += 1
        if self._follows(mistake):
            return
        key = _same(mistake)
        first = self._mistakes.setdefault(key, mistake)
        if first.span != mistake.span and mistake.code in OF_A_NAME:
            self._elsewhere.setdefault(key, []).append(mistake.span)

    def add(self, error: PlanError) -> None:
        """Adds the mistakes of an error that was caught so that the search can go on."""
        for mistake in error.diagnostics:
            self.tell(mistake)

    @contextmanager
    def catch(self) -> Generator[None]:
        """Adds the mistakes that are raised inside; code after it can go on without the inside."""
        try:
            yield
        except PlanError as error:
            self.add(error)
        except Unknown:
            pass

    def __bool__(self) -> bool:
        return bool(self._mistakes)

    @property
    def codes(self) -> set[str]:
        """The codes of all mistakes."""
        return {mistake.code for mistake in self._mistakes.values()}

    def check(self) -> None:
        """Raises PlanError with all mistakes, if there are any."""
        if not self._mistakes:
            return
        mistakes: list[Diagnostic] = []
        for key, mistake in self._mistakes.items():
            mistakes.append(_with_places(mistake, self._elsewhere.get(key, ())))
        raise PlanError(mistakes)

    def _follows(self, mistake: Diagnostic) -> bool:
        """Whether a mistake may follow from others: then it is not reported."""
        if mistake.code not in FOLLOWS:
            return False
        words: set[str] = set()
        for quoted in _QUOTED.findall(mistake.message):
            words.update(_NAME.findall(quoted))
        doubtful = self.doubtful
        if mistake.code in UNUSED:
            doubtful = self.doubtful | self.used
        return not words.isdisjoint(doubtful) or not self.in_part.isdisjoint(FOLLOWS[mistake.code])


def _same(mistake: Diagnostic) -> object:
    """The key that all mistakes share that are reported as one."""
    message = _PART.sub("", mistake.message)
    if mistake.code in OF_A_NAME:
        return _QUOTED.findall(message)[0]
    if mistake.code in OF_A_CONSTANT:
        return mistake.code, None, message
    return mistake.code, mistake.span, message


def _with_places(mistake: Diagnostic, places: Sequence[Span]) -> Diagnostic:
    """A mistake of a name, with the other places where the name is."""
    in_order = sorted({*places}, key=_position)
    notes = [Note(span, "and here") for span in in_order[:PLACES]]
    if others := in_order[PLACES:]:
        noun = "place" if len(others) == 1 else "places"
        notes.append(Note(None, f"and at {len(others)} more {noun}"))
    return evolve(mistake, notes=(*mistake.notes, *notes))


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice that is misspelt as `word`, in upper or lower case; "" if none is near it."""
    from difflib import get_close_matches

    folded = {choice.casefold(): choice for choice in choices}
    near = get_close_matches(word.casefold(), list(folded), n=1)
    return folded[near[0]] if near else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Help for a misspelt word; "" if no choice is near it."""
    near = nearest(word, choices)
    return f"did you mean `{near}`?" if near else ""


def listing(words: Iterable[str]) -> str:
    """Words in backticks, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


# ---- showing

_STYLES = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "strong": "\x1b[1m",
    "gutter": "\x1b[1;34m",
    "help": "\x1b[1;32m",
}


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour the text of `stream`: a terminal, and NO_COLOR unset (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def render(diagnostic: Diagnostic, *, colour: bool = False) -> str:
    """The diagnostic as lines of text, with the lines of the plan that it is about."""
    return "\n".join(_Renderer(diagnostic, colour).lines())


@frozen
class _Mark:
    """An underline below a line of the plan."""

    span: Span
    sign: str
    label: str
    style: str


class _Renderer:
    def __init__(self, diagnostic: Diagnostic, colour: bool) -> None:
        self._diagnostic = diagnostic
        self._colour = colour
        self._marks = [_Mark(diagnostic.span, "^", diagnostic.label, diagnostic.severity)]
        for note in diagnostic.notes:
            if note.span:
                self._marks.append(_Mark(note.span, "-", note.text, "gutter"))
        self._width = len(str(max(mark.span.line for mark in self._marks)))

    def lines(self) -> Iterator[str]:
        diagnostic = self._diagnostic
        head = self._paint(f"{diagnostic.severity}[{diagnostic.code}]", diagnostic.severity)
        yield head + self._paint(f": {diagnostic.message}", "strong")
        marks_by_path: dict[str, list[_Mark]] = {}
        for mark in self._marks:
            marks_by_path.setdefault(mark.span.path, []).append(mark)
        for path, marks in marks_by_path.items():
            arrow = "-->" if path == diagnostic.span.path else ":::"
            yield from self._excerpt(arrow, marks)
        notes = [note.text for note in diagnostic.notes if not note.span]
        if notes or diagnostic.help:
            yield self._gutter("|")
        for text in notes:
            yield from self._remark("note", text, "strong")
        if diagnostic.help:
            yield from self._remark("help", diagnostic.help, "help")

    def _excerpt(self, arrow: str, marks: list[_Mark]) -> Iterator[str]:
        first = marks[0].span
        place = f"{first.path}:{first.line}:{first.column}" if first.line else first.path
        yield " " * self._width + self._paint(arrow, "gutter") + f" {_printable(place)}"
        if not first.line or not first.text:
            return
        yield self._gutter("|")
        before = 0
        for number in sorted({mark.span.line for mark in marks}):
            if before and number > before + 1:
                yield self._paint("...", "gutter")
            before = number
            line = _printable(first.text.split("\n")[number - 1])
            yield f"{self._gutter('|', number)} {line}".rstrip()
            for mark in marks:
                if mark.span.line == number:
                    yield self._underline(mark, line)

    def _underline(self, mark: _Mark, line: str) -> str:
        """The line below one of the plan, with the signs and the label of a mark."""
        span = mark.span
        end = span.end_column
        if span.end_line != span.line:
            end = len(line.rstrip()) + 1
        signs = mark.sign * max(1, end - span.column)
        underline = self._paint(f"{signs} {mark.label}".rstrip(), mark.style)
        return f"{self._gutter('|')} {' ' * (span.column - 1)}{underline}"

    def _gutter(self, sign: str, number: int | str = "") -> str:
        return self._paint(f"{number:>{self._width}} {sign}", "gutter")

    def _remark(self, kind: str, text: str, style: str) -> Iterator[str]:
        head, *more = text.split("\n")
        yield f"{self._gutter('=')} {self._paint(kind, style)}: {_printable(head)}"
        indent = " " * (self._width + len(kind) + 5)
        for line in more:
            yield indent + _printable(line)

    def _paint(self, text: str, style: str) -> str:
        text = _printable(text)
        return f"{_STYLES[style]}{text}\x1b[0m" if self._colour else text


def _printable(line: str) -> str:
    """The line without characters that would move the cursor: one column for each character."""
    return "".join(character if character.isprintable() else " " for character in line)
