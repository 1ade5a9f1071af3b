"""The table of sizes.md: `python docs/sizes.py` has `scalec plan` find the fastest plan for each
model and number of GPUs, and writes its row.  Takes some minutes.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from page_tables import markdown, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sizes.md"
GIB = 2**30


class Size(NamedTuple):
    """A row of the table: a model of a shipped plan, GPUs, and the sequences of a step."""

    name: str
    plan: str
    gpus: int
    sequences: int


SIZES = (
    Size("1B (Llama 3.2)", "llama3_2_1b", 8, 512),
    Size("1B (Llama 3.2)", "llama3_2_1b", 64, 512),
    Size("8B (Llama 3)", "llama3_8b", 8, 512),
    Size("8B (Llama 3)", "llama3_8b", 64, 512),
    Size("8B (Llama 3)", "llama3_8b", 512, 1024),
    Size("70B (Llama 3)", "llama3_70b", 64, 512),
    Size("70B (Llama 3)", "llama3_70b", 512, 1024),
    Size("405B (Llama 3)", "llama3_405b", 1024, 2048),
    Size("405B (Llama 3)", "llama3_405b", 8192, 2048),
    Size("47B of experts (Mixtral 8x7B)", "mixtral_8x7b", 64, 1024),
    Size("30B of experts (Qwen3-30B-A3B)", "qwen3_30b_a3b", 64, 1024),
)


def fastest(size: Size) -> dict[str, Any]:
    """The first plan that `scalec plan --json` finds."""
    command = [sys.executable, "-m", "scalec", "plan", f"scalec:{size.plan}"]
    options = ["--gpus", str(size.gpus), "--cluster", "h100_sxm", "--seq", "8192"]
    batch = ["--global-batch", str(size.sequences), "--top", "1", "--json"]
    ended = subprocess.run([*command, *options, *batch], check=True, capture_output=True, text=True)
    return json.loads(ended.stdout)["plans"][0]


def degrees(choice: dict[str, Any]) -> str:
    """The axes of a plan that are larger than 1, and the other choices that differ from none."""
    axes = [f"{axis} {choice[axis]}" for axis in ("pp", "dp", "cp", "ep", "tp") if choice[axis] > 1]
    others = [f"zero {choice['zero']}"] if choice["zero"] else []
    if choice["sp"]:
        others.append("sequence parallel")
    if choice["recompute"] != "none":
        others.append(f"recompute {choice['recompute']}")
    if choice["schedule"]:
        others.append(choice["schedule"])
    others.append(f"microbatch {choice['microbatch']}")
    return ", ".join([" × ".join(axes), *others])


def cells(size: Size) -> list[str]:
    """The row of the table."""
    plan = fastest(size)
    return [
        size.name,
        f"{size.gpus:,}",
        degrees(plan["choice"]),
        f"{plan['needs'] / GIB:.0f} GiB",
        f"{plan['seconds']:.2f} s",
        f"{plan['tokens_per_second_per_gpu']:,.0f}",
        f"{plan['mfu']:.0%}",
    ]


def table() -> str:
    """The table as the page has it."""
    heads = "model, GPUs, fastest plan, memory, step, tokens/s/GPU, MFU"
    return markdown(heads.split(", "), [cells(size) for size in SIZES])


if __name__ == "__main__":
    write(PAGE, Path(__file__).name, table())
