"""A Slurm of one machine: `srun` and `scontrol` for a job's script, and `sbatch`, which also runs
it when requeued.

Nodes are groups of processes that take themselves for others' machines.  Where the file `due`
appears in the job's folder, the time limit is near, and the tasks of the running step get SIGUSR1.
Non-goals: queues, cgroups, containers.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

NODES = ("localhost", "127.0.0.1")


def sbatch(script: Path, folder: Path, **environment: str) -> list[tuple[int, str]]:
    """Runs a script as a job in `folder`; the status and the output of each start of it."""
    text = script.read_text()
    nodes, tasks = (
        int(re.findall(rf"^#SBATCH --{it}=(\d+)$", text, re.M)[0])
        for it in ("nodes", "ntasks-per-node")
    )
    assert nodes <= len(NODES)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("srun", "scontrol"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        (programs / name).chmod(0o755)
    variables = {
        **os.environ,
        **environment,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": ",".join(NODES[:nodes]),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
    }
    ended, requeued = list[tuple[int, str]](), folder / "requeued"
    while not ended or requeued.exists():
        requeued.unlink(missing_ok=True)
        job = subprocess.run(
            ["bash", str(script)],
            cwd=folder,
            env={**variables, "SLURM_RESTART_COUNT": str(len(ended))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ended.append((job.returncode, job.stdout))
    return ended


def srun(words: list[str]) -> int:
    """Starts the tasks, signals them where it is due, and gives the largest status."""
    command = words[next(at for at, word in enumerate(words) if not word.startswith("-")) :]
    near = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % near)},
        )
        for task in range(int(os.environ["SLURM_NTASKS"]))
    ]
    due = Path("due")
    while any(task.poll() is None for task in tasks):
        if due.exists():
            due.unlink()
            for task in tasks:
                task.send_signal(signal.SIGUSR1)
        time.sleep(0.01)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def scontrol(words: list[str]) -> int:
    """`show hostnames LIST` and `requeue JOB`."""
    match words:
        case ["show", "hostnames", nodes]:
            print(nodes.replace(",", "\n"))
        case ["requeue", job] if job == os.environ["SLURM_JOB_ID"]:
            Path("requeued").touch()
        case _:
            raise ValueError(words)
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
