"""The command `import`: a plan from the configuration of a Hugging Face model.

Non-goals: what the plan says (`importer`).
"""

import sys
from argparse import Namespace

from .exit_codes import UsageError
from .streams import as_file


def import_(options: Namespace) -> None:
    """`scalec import`."""
    from ..frontend.hf_import import import_config
    from ..syntax.limits import load

    text = import_config(load(options.config))
    if options.output is None:
        as_file()
        sys.stdout.write(text)
        return
    try:
        with options.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write `{options.output}`: {reason}; choose another file with -o") from error
    print(f"wrote {options.output}; the mesh and how it trains are yours to set")
