"""`.venv/bin/python benchmarks/key_strokes.py`: the CPU time of a key stroke in two plans, in
`scalec lsp`.

A key stroke changes the seed, which leaves the compiled step as it is, or the length of sequences,
after which all is compiled anew.  Everything an editor asks for then is answered: mistakes,
colours, hints, words for the place, and after the pause the compiled step and a hover.  Bar: 100 ms
of CPU for all of it, busy cores or not.
"""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time

from measure import asked_quick, table, where

from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.tools.language_server.complete import complete
from scalec.tools.language_server.diagnose import get_shown_diagnostics
from scalec.tools.language_server.document import Document, compile_document, parse_document
from scalec.tools.language_server.hints import colours, hints
from scalec.tools.language_server.hover import hover

PLANS = Path(__file__).parent.parent / "plans"
BAR = 0.100

Edit = Callable[[str, int], str]
"""Gives the text after the key stroke of this number, which is another one than the text before."""


def _other_seed(text: str, number: int) -> str:
    return re.sub(r"seed = \d+", f"seed = {number + 1}", text)


def _other_length(text: str, number: int) -> str:
    """Twice the tokens in a sequence, or as many as before."""
    (length,) = re.findall(r"seq = (\d+)", text)
    changed = int(length) // 2 if number % 2 else int(length) * 2
    return text.replace(f"seq = {length}", f"seq = {changed}")


def main() -> None:
    rounds = 5 if asked_quick(__doc__) else 50
    print(where())
    for plan in ("llama3_405b", "deepseek_v3"):
        for what, edit in (("seed", _other_seed), ("sequence length", _other_length)):
            _measure(plan, what, edit, rounds)


def _measure(plan: str, what: str, edit: Edit, rounds: int) -> None:
    document = compile_document(parse_document(None, load(PLANS / f"{plan}.scale")))
    spent: dict[str, list[float]] = {}
    for number in range(rounds):
        document = _key_stroke(document, edit(document.source.text, number), spent)
    rows = [_row(*it) for it in spent.items()]
    title = f"{plan}, a key stroke in its {what}: medians, and the most, of CPU time"
    table(title, ("", "median", "most"), rows)
    every = [sum(times) for times in zip(*spent.values(), strict=True)]
    print(f"all of it: {_ms(median(every))}, at most {_ms(max(every))}; the bar is {_ms(BAR)}")


def _key_stroke(document: Document, text: str, spent: dict[str, list[float]]) -> Document:

    def timed(name: str, answer: Callable[[], Document | object]) -> object:
        start = process_time()
        found = answer()
        spent.setdefault(name, []).append(process_time() - start)
        return found

    now = timed(
        "syntax and mistakes", lambda: parse_document(document, Source(document.source.path, text))
    )
    assert isinstance(now, Document)
    timed("what is shown of them", lambda: get_shown_diagnostics(now))
    timed("colours", lambda: [*colours(now)])
    timed("hints, by the step before", lambda: [*hints(now, 1, 99)])
    timed("words for a place", lambda: complete(now, 14, 3))
    step = timed("the step, after a pause", lambda: compile_document(now))
    assert isinstance(step, Document)
    assert step.facts
    assert step.facts.model == now.model, "the plan is whole after each key stroke"
    timed("a hover", lambda: hover(step, 12, 20))
    return step


def _row(name: str, times: list[float]) -> tuple[str, str, str]:
    return name, _ms(median(times)), _ms(max(times))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
