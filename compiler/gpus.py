"""GPUs by name: what they hold, and whether Triton's kernels run on them.

Non-goals: speeds, which differ with clocks and links.
"""

from attrs import frozen

from .diagnostics import Diagnostic, Diagnostics, Note, PlanError, did_you_mean, listing
from .ir import Program
from .settings import AUTO, TORCH, TRITON, Cluster, Train


@frozen
class Gpu:
    """A GPU by NVIDIA's data sheets.

    memory      in GB; taken as GiB: of these a driver shows all but a percent or two
    capability  of its multiprocessors, for instance 90 for sm_90
    """

    memory: int
    capability: int


GPUS = {
    "a100_40gb": Gpu(40, 80),
    "a100_80gb": Gpu(80, 80),
    "a10g": Gpu(24, 86),
    "b200": Gpu(180, 100),
    "h100_nvl": Gpu(94, 90),
    "h100_pcie": Gpu(80, 90),
    "h100_sxm": Gpu(80, 90),
    "h200": Gpu(141, 90),
    "l4": Gpu(24, 89),
    "l40s": Gpu(48, 89),
    "rtx_3090": Gpu(24, 86),
    "rtx_4090": Gpu(24, 89),
    "rtx_5090": Gpu(32, 120),
    "rtx_a6000": Gpu(48, 86),
    "t4": Gpu(16, 75),
    "v100_16gb": Gpu(16, 70),
    "v100_32gb": Gpu(32, 70),
}

ANOTHER = (
    "of another GPU say how much it holds, as in `gpu = mine  memory = 64GiB`; it gets no Triton kernels by itself"
)

LEAST = 80
"""The first capability with bf16 and asynchronous copies, for which the kernels are written."""


def check_gpu(cluster: Cluster, found: Diagnostics) -> None:
    """A plan names a GPU of the table, or says what one holds."""
    name, span = cluster.gpu, cluster.spans["gpu"]
    if cluster.memory and not name:
        help = "say of which GPU: its name may be any"
        found.error("E0402", "`cluster` has `memory`, and needs `gpu`", cluster.spans["memory"], help=help)
    elif name and name not in GPUS and cluster.memory is None:
        alike = [known for known in GPUS if known.startswith(name.casefold())]
        help = f"did you mean {' or '.join(f'`{known}`' for known in alike)}?" if alike else did_you_mean(name, GPUS)
        notes = [Note(None, f"known are {listing(GPUS)}"), Note(None, ANOTHER)]
        found.error("E0415", f"there is no GPU `{name}`", span, notes=notes, help=help)


def gpu(program: Program) -> Gpu | None:
    """The GPU of the plan's cluster, if it names one that is known."""
    return GPUS.get(program.cluster.gpu)


def kernels_for(train: Train, cluster: Cluster) -> str:
    """What the plan says, or what its GPU is for.  Raises PlanError where the GPU is too old for what it says."""
    found = GPUS.get(cluster.gpu)
    able = found is not None and found.capability >= LEAST
    if found and train.kernels == TRITON and not able:
        message = f"Triton's kernels are for GPUs of compute capability {LEAST / 10} and above"
        label = f"`{cluster.gpu}` has {found.capability / 10}"
        span = train.spans["kernels"]
        raise PlanError([Diagnostic("E0413", message, span, label, help="write `kernels = torch`")])
    if train.kernels != AUTO:
        return train.kernels
    return TRITON if able else TORCH
