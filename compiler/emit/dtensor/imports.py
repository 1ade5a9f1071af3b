"""The imports of a program of torch alone, and the source of what it calls of
`codegen_templates/torch_*.py`.
"""

import ast
from collections.abc import Iterator

from ...ops.protocol import FUNCTIONAL
from ...syntax.package_data import folder
from ..imports import IMPORTS, names_in

MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("import math", ("math",)),
    ("import os", ("os",)),
    ("import re", ("re",)),
    ("import sys", ("sys",)),
    ("collections.abc", ("Callable", "Generator", "Iterable", "Iterator", "Mapping", "Sequence")),
    ("contextlib", ("contextmanager",)),
    ("functools", ("partial", "reduce")),
    ("pathlib", ("Path",)),
    ("typing", ("Any", "NamedTuple", "cast")),
    ("", ()),
    ("import torch", ("torch",)),
    ("import torch.distributed as dist", ("dist",)),
    ("import torch.distributed.checkpoint as dcp", ("dcp",)),
    ("torch", ("Tensor", "nn")),
    ("torch.autograd.graph", ("saved_tensors_hooks",)),
    ("torch.distributed.checkpoint", ("HuggingFaceStorageReader", "HuggingFaceStorageWriter")),
    (
        "torch.distributed.checkpoint.state_dict",
        ("StateDictOptions", "get_model_state_dict", "get_optimizer_state_dict"),
    ),
    ("torch.distributed.device_mesh", ("DeviceMesh", "init_device_mesh")),
    (
        "torch.distributed.fsdp",
        ("DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "fully_shard"),
    ),
    ("torch.distributed.pipelining", ("PipelineStage",)),
    ("torch.distributed.pipelining.microbatch", ("TensorChunkSpec",)),
    ("torch.distributed.pipelining.schedules", ("_PipelineScheduleRuntime",)),
    (
        "torch.distributed.tensor",
        ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor", "empty"),
    ),
    ("torch.distributed.tensor.experimental", ("local_map",)),
    ("torch.distributed.tensor.placement_types", ("Placement",)),
    (FUNCTIONAL, tuple(name for name in IMPORTS[FUNCTIONAL] if name != "linear")),
    ("torch.utils.checkpoint", ("checkpoint",)),
)
"""Modules and the names that a program may import from them, in the order of their lines."""

FILES = (
    "torch_ops.py",
    "torch_attention.py",
    "torch_ring.py",
    "torch_recompute.py",
    "torch_step.py",
    "torch_pipeline.py",
)
"""The files of `codegen_templates` whose functions and classes programs hold."""


def import_lines(text: str, user_modules: tuple[str, ...]) -> str:
    """The lines that import what a program's text names, after its user ops' modules."""
    used = names_in(text)
    lines: list[str] = []
    for module, names in MODULES:
        if some := ", ".join(name for name in names if name in used):
            lines.append(module if module.startswith("import") else f"from {module} import {some}")
        elif not module:
            lines += ["", *(f"import {name}" for name in user_modules)]
    return "\n".join(lines) + "\n"


def ops_source(text: str) -> str:
    """The source of the functions and classes that a text names, and of all that these name in
    turn, file by file.
    """
    texts = {name: source for file in FILES for name, source in _definitions(file)}
    wanted, new = set[str](), names_in(text) & texts.keys()
    while new:
        wanted |= new
        new = {
            name for definition in new for name in names_in(texts[definition])
        } & texts.keys() - wanted
    return "".join(f"\n\n{source}\n" for name, source in texts.items() if name in wanted)


def _definitions(file: str) -> Iterator[tuple[str, str]]:
    """The functions and classes of a file, each with its lines."""
    source = (folder("codegen_templates") / file).read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])
