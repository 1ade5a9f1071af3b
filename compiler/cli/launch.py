"""`scalec launch`: writes the script that trains a plan on a cluster."""

from argparse import Namespace
from pathlib import Path

from .streams import UsageError

SCHEDULERS = ("slurm", "k8s")


def launch(options: Namespace) -> None:
    """`scalec launch`."""
    from ..emit.naming import run_word
    from ..emit.write_files import OutputError, write
    from ..reports.launch_script import FILES, files
    from .compile import load, written

    if options.scheduler == "k8s" and not options.image:
        raise UsageError("a job of Kubernetes needs an image with scalec in it: --image IMAGE")
    plan = load(options.plan)
    folder = Path(written(plan, options).parent)
    how = {name: getattr(options, name) for name in ("time", "grace", "cpus", "sbatch", "image", "claim")}
    run = run_word(plan.source.path)
    try:
        write(folder, files(options.scheduler, plan.program, options.plan, run, folder, options.rest, how))
    except OutputError as error:
        raise UsageError(str(error)) from error
    file = folder / FILES[options.scheduler]
    start = {"slurm": f"sbatch {file}", "k8s": f"kubectl apply -f {file}"}[options.scheduler]
    print(f"wrote {file}\nto train:\n\n  {start}")
