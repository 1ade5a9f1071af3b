"""A Slurm of this machine: its own daemons, for some nodes that are all 127.0.0.1, in one folder
and by this user.

Non-goals: control groups, accounts and munge (`auth/none`), nodes that tell each other apart by
their names.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_HOST = socket.gethostname()
NODES = (_HOST, f"{_HOST}z1", f"{_HOST}z2")
"""Ranks meet at the first one of a job, whose name has to be an address: it has the least
weight, and sorts first.
"""
INSTALLED = all(
    shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    for name in ("slurmctld", "slurmd", "sbatch")
)
HANGS = 420
"""Seconds after which what is waited for is taken not to come: limits and requeues of Slurm
take minutes.
"""

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Slurm's daemons, started when entered; jobs run in `folder`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self._own, self._names = folder, folder / "slurm", NODES[:nodes]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(self._own / "slurm.conf"),
        }

    def __enter__(self) -> "Cluster":
        (self._own / "state").mkdir(parents=True)
        control, *ports = _ports(1 + len(self._names))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000"
            f" Weight={weight}"
            for weight, (name, port) in enumerate(zip(self._names, ports, strict=True), 1)
        )
        user = self._said("id", "-un").strip()
        text = _CONFIGURATION.format(control=control, user=user, folder=self._own, nodes=nodes)
        (self._own / "slurm.conf").write_text(text)
        self._start("control", "slurmctld", "-D")
        for name in self._names:
            (self._own / f"spool-{name}").mkdir()
            self._start(name, "slurmd", "-D", "-N", name)
        self.until(
            lambda: (
                self._said("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self._names)
            )
        )
        return self

    def _start(self, name: str, *words: str) -> None:
        with open(self._own / f"{name}.out", "wb") as out:
            self._daemons[name] = subprocess.Popen(
                words, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )

    def __exit__(self, *raised: object) -> None:
        self._said("scancel", "--signal=KILL", "--full", "--user", self._said("id", "-un").strip())
        for name in ("control", *self._names):
            if (daemon := self._daemons.pop(name, None)) is not None:
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        for process in self._left():
            os.kill(process, signal.SIGKILL)

    def _left(self, of: str = "") -> list[int]:
        """Processes of jobs, and of a node of them: slurmstepd, and what it has started."""
        found = list[int]()
        for each in Path("/proc").glob("[0-9]*"):
            try:
                said = (each / "environ").read_bytes()
            except OSError:
                continue
            words = said.split(b"\0")
            if f"SLURM_CONF={self._own / 'slurm.conf'}".encode() in words and (
                not of or f"SLURMD_NODENAME={of}".encode() in words
            ):
                found.append(int(each.name))
        return found

    def _said(self, *words: str) -> str:
        return subprocess.run(
            words, env=self._environment, cwd=self.folder, capture_output=True, text=True
        ).stdout

    def submit(self, script: Path, **environment: str) -> str:
        """The number of a job."""
        job = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=self._environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert job.returncode == 0, job.stderr
        return job.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Slurm's own account of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self._said("scontrol", "show", "job", job)))

    def until(self, true: Callable[[], bool], seconds: float = HANGS) -> None:
        """Waits for it."""
        limit = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < limit, (
                self._said("squeue"),
                self._said("sinfo", "-N", "-l"),
                self.logs(),
            )
            time.sleep(0.5)

    def logs(self) -> str:
        """The last lines of the daemons and of jobs."""
        return "\n".join(
            f"{log}\n{log.read_text(errors='replace')[-3000:]}"
            for log in self.folder.rglob("*.log")
        )

    def lose(self, node: str) -> None:
        """Kills a node: its daemon, and all that runs there."""
        self._daemons.pop(node).kill()
        for process in self._left(node):
            os.kill(process, signal.SIGKILL)

    def cancel(self, job: str) -> None:
        """As a person does."""
        self._said("scancel", job)


def _ports(count: int) -> list[int]:
    """Free ones."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
