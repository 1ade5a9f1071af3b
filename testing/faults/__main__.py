"""A rank of a program under torchrun, with faults: `-m scalec.testing.faults FOLDER train.py
OPTIONS`.
"""

import os
import sys
from pathlib import Path

from .ranks import begin, run_file


def main() -> None:
    """Has faults strike in this process, and runs the program as Python would."""
    folder, *sys.argv = sys.argv[1:]
    begin(Path(folder), int(os.environ.get("RANK", 0)))
    run_file(sys.argv[0])


if __name__ == "__main__":
    main()
