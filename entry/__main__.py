"""`python -m scalec`: the command line without its script."""

import sys

from scalec.compiler.cli import main

sys.exit(main())
