"""The imports of a program of torch alone, and the library beside it, `torch_ops.py`.

Purpose: a program imports what it uses, and nothing else.  Non-goals: what the library does.
"""

import re
from collections.abc import Collection, Iterable

from ...ops.protocol import FUNCTIONAL
from ...syntax.package_data import folder
from ..imports import IMPORTS, names_in

LIBRARY = "torch_ops"
"""The module beside the program: its file is the same for every plan."""

LIBRARY_FILE = f"{LIBRARY}.py"
MISSING = f"copy {LIBRARY_FILE} beside this file, or compile the plan again"
"""The remedy where a program does not find the library."""

Modules = tuple[tuple[str, tuple[str, ...]], ...]

STANDARD: Modules = (
    ("import math", ("math",)),
    ("import sys", ("sys",)),
    ("collections.abc", ("Mapping", "Sequence")),
    ("functools", ("partial",)),
    ("pathlib", ("Path",)),
)
"""Modules of Python's library and the names that a program may import from them, in the order of
their lines.
"""

TORCH: Modules = (
    ("import torch", ("torch",)),
    ("import torch.distributed as dist", ("dist",)),
    ("torch", ("Tensor", "nn")),
    ("torch.distributed.device_mesh", ("DeviceMesh",)),
    (
        "torch.distributed.fsdp",
        ("DataParallelMeshDims", "MixedPrecisionPolicy", "fully_shard"),
    ),
    ("torch.distributed.tensor", ("DTensor", "Partial", "Replicate", "Shard")),
    (FUNCTIONAL, tuple(name for name in IMPORTS[FUNCTIONAL] if name != "linear")),
)
"""The same for torch's modules; `linear` is the library's."""


def get_library() -> str:
    """The text of the library."""
    return (folder("codegen_templates") / LIBRARY_FILE).read_text()


def get_library_names() -> set[str]:
    """The functions and classes of the library."""
    return {*re.findall(r"^(?:def|class) (\w+)", get_library(), re.MULTILINE)}


def import_lines(text: str, user_modules: Iterable[str]) -> list[str]:
    """The lines that import what a program's text names, and the modules of its user ops."""
    used = names_in(text) | {"sys"}
    return [
        *_module_lines(STANDARD, used),
        "",
        *(f"import {name}" for name in user_modules),
        *_module_lines(TORCH, used),
        "",
        *library_import(used & get_library_names()),
    ]


def _module_lines(modules: Modules, used: Collection[str]) -> list[str]:
    lines: list[str] = []
    for module, names in modules:
        imported = [name for name in names if name in used]
        if imported and module.startswith("import "):
            lines.append(module)
        elif imported:
            lines.append(f"from {module} import {', '.join(imported)}")
    return lines


def library_import(names: Iterable[str]) -> list[str]:
    """The lines that import names of the library, and say in one line where it is missing."""
    in_order = sorted(names, key=lambda name: (name.islower(), name))
    return [
        "try:",
        f"    from {LIBRARY} import (",
        *(f"        {name}," for name in in_order),
        "    )",
        "except ModuleNotFoundError as error:",
        f'    sys.exit(f"error: {{error}}: {MISSING}")',
    ]
