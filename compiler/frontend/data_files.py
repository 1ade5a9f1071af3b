"""Files of training data that are there when a plan is compiled: whether they hold what the
plan takes them for.
"""

from collections.abc import Iterator
from contextlib import suppress

from ...formats.data import TEXT, address, address_advice, files_of, folders_of, foreign, some
from ...formats.token_folder import TokenFolder, TokenFolderError
from ..config.settings import FOLDER, ON, Data, DataSet
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note

MATCHES, READ = 1000, 32
"""The most files of a pattern that are found, and that are read: editors compile a plan at each
pause.
"""


def largest_vocabulary(data: Data) -> tuple[int, str]:
    """The size of the largest vocabulary of the folders that are there, and its folder."""
    sizes = [(0, "")]
    patterns = [*(data.files or ()), *(name for part in data.sets for name in part.files)]
    for pattern in patterns:
        for folder in folders_of(pattern):
            with suppress(TokenFolderError):
                sizes.append((TokenFolder.read(folder).recipe.vocab, folder))
    return max(sizes)


def check_files(train: tree.Section, data: Data, diagnostics: Diagnostics) -> None:
    """Adds a mistake for each pattern that is an address, or matches a file of another format."""
    if data.as_is == ON:
        return
    for pattern in _patterns(train):
        if address(pattern.value):
            diagnostics.error("E0420", address_advice(pattern.value), pattern.span)
        elif data.kind == FOLDER:
            _check_folders(pattern, diagnostics)
        else:
            dtype = TEXT if data.kind == "text" else data.dtype
            _check_pattern(pattern, dtype, diagnostics)


def _check_folders(pattern: tree.String, diagnostics: Diagnostics) -> None:
    """Adds the mistake of the first folder that `scalec data` did not write, or not to its end;
    a folder that is not there is left to the run.
    """
    for folder in folders_of(pattern.value):
        try:
            TokenFolder.read(folder).require_samples(folder)
        except TokenFolderError as error:
            help = "`data folder` takes folders that `scalec data` wrote: docs/data.md"
            diagnostics.error("E0420", str(error), pattern.span, help=help)
            return


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
