"""Files of training data that are there when a plan is compiled: whether they hold what the
plan takes them for.
"""

from collections.abc import Iterator

from ...formats.data import TEXT, address, address_advice, files_of, foreign, some
from ..config.settings import ON, Data, DataSet
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note

MATCHES, READ = 1000, 32
"""The most files of a pattern that are found, and that are read: editors compile a plan at each
pause.
"""


def check_files(train: tree.Section, data: Data, diagnostics: Diagnostics) -> None:
    """Adds a mistake for each pattern that is an address, or matches a file of another format."""
    if data.as_is == ON:
        return
    dtype = TEXT if data.kind == "text" else data.dtype
    for pattern in _patterns(train):
        if address(pattern.value):
            diagnostics.error("E0420", address_advice(pattern.value), pattern.span)
        else:
            _check_pattern(pattern, dtype, diagnostics)


def _check_pattern(pattern: tree.String, dtype: str, diagnostics: Diagnostics) -> None:
    """Adds the mistake of the first file of another format; one that cannot be read is left to
    the run.
    """
    for path in some(files_of(pattern.value, MATCHES), READ):
        try:
            mistake = foreign(path, dtype)
        except OSError:
            continue
        if mistake:
            notes = [Note(None, line) for line in mistake.remedy]
            help = "if the file is what you mean in spite of its first bytes, write `as_is = on`"
            diagnostics.error("E0420", str(mistake), pattern.span, notes=notes, help=help)
            return


def _patterns(section: tree.Section) -> Iterator[tree.String]:
    """The patterns of files in `data` and its sets, as they are written."""
    for entry in section.entries:
        match entry:
            case tree.Section(kind=tree.Name(name=Data.SECTION | DataSet.SECTION)):
                yield from _patterns(entry)
            case tree.Setting(key=tree.Name(name="files"), value=tree.List(items=items)):
                for item in items:
                    if isinstance(item, tree.String):
                        yield item
            case _:
                pass
