"""Kernels compiled for chips that are not there: the launches of a call, and what each becomes
on a chip.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
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

SHARED = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
"""Bytes of shared memory that one program may have, by compute capability (CUDA programming
guide, appendix K).
"""

SECONDS = 30
"""The most processors' time that compiling a kernel may take; half a second is usual, attention
takes one or two.
"""

TUNED = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
"""Whether kernels have the registers for which tiles were chosen: from 3.8 on Triton gives some
of them more.
"""

SPILLED = 0 if TUNED else 96
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
        args = [_typed(arg) + (" of 16" if _of_16(arg) else "") for arg in self.args]
        return f"{self.name}({', '.join(args)}, {self.constants}, {self.options})"

    @property
    def bytes(self) -> int:
        """The sizes of all operands and results."""
        return sum(arg.numel() * arg.itemsize for arg in self.args if isinstance(arg, Tensor))

    @property
    def name(self) -> str:
        """The kernel, with its module."""
        return f"{self.kernel.__module__.rpartition('.')[-1]}.{self.kernel.__name__}"


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: bytes of shared memory a program, registers and spilled bytes a thread,
    and two texts.

    layouts is Triton's own language for GPUs, in which tensors have theirs.
    """

    shared: int
    registers: int
    spilled: int
    layouts: str
    ptx: str

    def __str__(self) -> str:
        return (
            f"{self.shared} bytes shared, {self.registers} registers, {self.spilled} bytes spilled"
        )


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Lists the launches of a block of calls on the meta device, instead of starting them."""
    launches: list[Launch] = []

    def record(
        kernel: Any,
        grid: tuple[int, ...],
        *args: Any,
        warps: int,
        stages: int | None = None,
        **constants: Any,
    ) -> None:
        options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
        launches.append(Launch(kernel, grid, args, constants, options))

    with patch.object(launching, "launch", record):
        yield launches


def check(launch: Launch, capability: int, spilled: float = SPILLED) -> Compiled:
    """Raises where a kernel does not compile for a chip, takes long to, does not fit it,
    spills, or does nothing.
    """
    began = sum(os.times()[:4])  # with those of assemblers
    code = compile_for(launch, capability)
    assert sum(os.times()[:4]) - began < SECONDS, str(launch)
    assert code.shared <= SHARED[capability], f"{launch}: {code}"
    assert code.spilled <= spilled, f"{launch}: {code}"
    assert "st.global" in code.ptx, (
        f"{launch}: of what Triton takes for undefined, LLVM leaves nothing"
    )
    return code


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compiles for a chip of this compute capability, as triton does where it starts the kernel
    there.
    """
    made = _compiled(launch, capability)
    return Compiled(
        made.metadata.shared, *_usage(made.asm["cubin"]), made.asm["ttgir"], made.asm["ptx"]
    )


def narrow_offsets(launch: Launch) -> list[str]:
    """Products of a size or stride in 32 bits, but with places in a block, which are few: where
    they may overflow.
    """
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", _compiled(launch, 90).asm["ttir"])
    given, few, narrow = set(re.findall(r"(%\w+): i(?:32|64)", text)), set[str](), list[str]()
    for line, result, op, operands in re.findall(r"^( *(%\w+) = ([\w.]+) (.*))$", text, re.M):
        used = set(re.findall(r"%\w+", operands))
        if op in ("tt.make_range", "arith.constant") or (used and used <= few):
            few.add(result)
        elif op in ("tt.splat", "tt.expand_dims", "tt.broadcast", "arith.extsi") and used <= given:
            given.add(result)
        elif (
            op == "arith.muli"
            and used & given
            and not used & few
            and line.rstrip(">").endswith("i32")
        ):
            narrow.append(line.strip())
    return narrow


def far_offsets(launch: Launch) -> list[str]:
    """Offsets in 32 bits that are too few, or may be, where the largest tensor has `MANY` elements.

    The largest value of each integer follows from the kernel's arguments and its first grid dim,
    both as many times larger as the tensor is.
    """
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", _compiled(launch, 90).asm["ttir"])
    more = max(MANY // max(arg.numel() for arg in launch.args if isinstance(arg, Tensor)), 1)
    given = zip(launch.kernel.arg_names, launch.args, strict=False)
    most = {f"%{name}": min(arg * more, 2**31 - 1) for name, arg in given if _is_int(arg)}
    far = list[str]()
    for result, op, rest in re.findall(
        r"^ *(?:scf\.for )?(%\w+) = ([\w.]+|%\w+ to)(.*)$", text, re.M
    ):
        used = re.findall(r"%\w+", rest)
        known = [most[name] for name in used if name in most]
        if op == "tt.addptr":
            narrow = rest.endswith(("xi32>", " i32"))
            far += [f"{op}{rest}"] if narrow and most.get(used[1], 2**31) >= 2**31 else []
        elif op == "tt.get_program_id":
            axis = "xyz".index(rest.split()[0])
            most[result] = launch.grid[axis] * (1 if axis else more)
        elif op in ("arith.constant", "tt.make_range") and (
            found := re.search(r"(?:^ |dense<|end = )(-?\d+)", rest)
        ):
            most[result] = abs(int(found[1]))
        elif op in _AT_MOST and len(known) == len(used):
            most[result] = _AT_MOST[op](known)
        elif op in ("arith.remsi", "arith.minsi") and known:
            most[result] = min(known)
        elif op.endswith(" to") and used[0] in most:  # a loop's number, up to its end
            most[result] = most[used[0]]
    return far


MANY = 1 << 33
"""Elements: more than 32 bits count."""

_AT_MOST: dict[str, Callable[[list[int]], int]] = {
    **dict.fromkeys(
        ("tt.splat", "tt.expand_dims", "tt.broadcast", "arith.extsi", "arith.divsi", "arith.maxsi"),
        max,
    ),
    **{"arith.muli": prod, "arith.addi": sum, "arith.subi": sum},
}
"""How large in magnitude an integer is at most, from what the operands are at most."""


def _compiled(launch: Launch, capability: int) -> Any:
    kernel = launch.kernel
    signature: dict[str, str] = dict.fromkeys(launch.constants, "constexpr")
    constants: dict[Any, Any] = dict(launch.constants)
    attributes: dict[Any, Any] = {}
    for index, (parameter, arg) in enumerate(zip(kernel.params, launch.args, strict=False)):
        fixed = arg is None or (_is_int(arg) and arg == 1 and not parameter.do_not_specialize)
        signature[parameter.name] = "constexpr" if fixed or parameter.is_constexpr else _typed(arg)
        if signature[parameter.name] == "constexpr":
            constants[parameter.name] = arg
        elif _of_16(arg) and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def _of_16(arg: Any) -> bool:
    """Whether Triton knows of an argument that 16 divides it, or the address; memory itself
    begins at such a one.
    """
    if isinstance(arg, Tensor):
        return arg.storage_offset() * arg.itemsize % 16 == 0
    return _is_int(arg) and arg % 16 == 0


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
    """Registers and bytes of stack of each thread; our kernels have nothing on the stack but
    what is spilled.
    """
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
