"""Kernels compiled for chips that are not there: the launches of a call, and what each becomes on a chip."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scalec.runtime.kernels import launching

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one program may have, by compute capability (CUDA programming guide, appendix K)."""

SECONDS = 30
"""What compiling one kernel may take of processors' time; half a second is usual, attention takes one or two."""

TUNED = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
"""Whether kernels have the registers for which tiles were chosen: from 3.8 on Triton gives some of them more."""

SPILLED = 16 if TUNED else 96
"""Bytes a thread that may be put aside."""

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel with all that decides what it is compiled to."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def __str__(self) -> str:
        args = [str(_typed(arg)) for arg in self.args]
        name = f"{self.kernel.__module__.rpartition('.')[-1]}.{self.kernel.__name__}"
        return f"{name}({', '.join(args)}, {self.constants}, {self.options})"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: bytes of shared memory a program, registers and spilled bytes a thread."""

    shared: int
    registers: int
    spilled: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Lists the launches of a block of calls on the meta device, instead of starting them."""
    launches: list[Launch] = []

    def record(
        kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int | None = None, **constants: Any
    ) -> None:
        options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
        launches.append(Launch(kernel, grid, args, constants, options))

    with patch.object(launching, "launch", record):
        yield launches


def check(launch: Launch, capability: int, spilled: float = SPILLED) -> None:
    """Raises where a kernel does not compile for a chip, takes long to, does not fit it, or spills."""
    began = sum(os.times()[:4])  # with those of assemblers
    needs = compile_for(launch, capability)
    assert sum(os.times()[:4]) - began < SECONDS, str(launch)
    assert needs.shared <= SHARED[capability], f"{launch}: {needs}"
    assert needs.spilled <= spilled, f"{launch}: {needs}"


def compile_for(launch: Launch, capability: int) -> Resources:
    """Compiles for a chip of this compute capability, as triton does where it starts the kernel there."""
    kernel = launch.kernel
    signature: dict[str, str] = dict.fromkeys(launch.constants, "constexpr")
    constants: dict[Any, Any] = dict(launch.constants)
    attributes: dict[Any, Any] = {}
    for index, (parameter, arg) in enumerate(zip(kernel.params, launch.args, strict=False)):
        fixed = arg is None or (_is_int(arg) and arg == 1 and not parameter.do_not_specialize)
        signature[parameter.name] = "constexpr" if fixed or parameter.is_constexpr else _typed(arg)
        if signature[parameter.name] == "constexpr":
            constants[parameter.name] = arg
        elif isinstance(arg, Tensor) or (_is_int(arg) and arg % 16 == 0 and not parameter.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    return Resources(compiled.metadata.shared, *_usage(compiled.asm["cubin"]))


def _is_int(arg: Any) -> TypeGuard[int]:
    return isinstance(arg, int) and not isinstance(arg, bool)


def _typed(arg: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(arg, Tensor):
        return "*" + _NAMES[arg.dtype]
    if isinstance(arg, bool):
        return "i1"
    if isinstance(arg, int):
        return "i32" if -(2**31) <= arg < 2**31 else "i64"
    return "fp32" if isinstance(arg, float) else str(arg)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of each thread; our kernels have nothing on the stack but what is spilled."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
