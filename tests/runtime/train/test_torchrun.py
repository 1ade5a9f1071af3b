"""The last line of a run that fails says why, below torchrun's report."""

import os
import select
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from socket import gethostname
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from helpers.forked_ranks import HANGS
from scalec.runtime.train.options import Options
from scalec.runtime.train.torchrun import find_first_failure

ENDING = (
    "from scalec.runtime.train.shutdown import ending\nfrom scalec.runtime.errors import"
    " RunError\nwith ending(): "
)
KILLED = (
    "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] =="
    " '1' else time.sleep(600)"
)
PROGRAMS = {
    f"{ENDING}raise RunError('no data')": "error: no data",
    f"{ENDING}raise ValueError('too many\\nlines')": (
        f"error: rank 0 on {gethostname()}: ValueError: too many lines"
    ),
    KILLED: "error: rank 1 was ended by SIGKILL",
    "import sys; sys.exit(3)": "error: rank 0 ended with exit status 3",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", PROGRAMS, ids=PROGRAMS.values())
def test_the_last_line(program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    ranks = 2 if program == KILLED else 1
    options = ["--standalone", f"--nproc-per-node={ranks}", str(tmp_path / "train.py")]
    command = [sys.executable, "-m", "scalec.runtime.train.torchrun", *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == PROGRAMS[program]
    assert "train.py FAILED" in ended.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("status", [75, 130])
def test_ranks_that_have_saved_give_their_status(status: int, tmp_path: Path) -> None:
    """Also where torchrun ends one that is about to end; they are not started anew."""
    program = f"""import os, sys, time
open({str(tmp_path / "starts")!r}, "a").write("1")
sys.exit({status}) if os.environ['RANK'] == '0' else time.sleep(600)
"""
    (tmp_path / "train.py").write_text(program)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(tmp_path / "train.py")]
    command = [sys.executable, "-m", "scalec.runtime.train.torchrun", *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode == status, ended.stderr
    assert len((tmp_path / "starts").read_text()) <= 2


ORPHAN = """
import os, time
from pathlib import Path
from scalec.runtime.train.launch import end_with_launcher
end_with_launcher()
Path(os.environ["RANK"] + ".tmp").write_text(str(os.getpid()))
Path(os.environ["RANK"] + ".tmp").rename(os.environ["RANK"])
time.sleep(600)
"""


@pytest.mark.long
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """Even where that is killed, and can end none."""
    (tmp_path / "train.py").write_text(ORPHAN)
    command = [
        sys.executable,
        "-m",
        "scalec.runtime.train.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
    ]
    launcher = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    until = monotonic() + HANGS
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert launcher.poll() is None
        assert monotonic() < until
        sleep(0.02)
    ranks = [os.pidfd_open(int((tmp_path / rank).read_text())) for rank in "01"]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(HANGS)
    for rank in ranks:
        assert select.select([rank], [], [], 60)[0], "a rank has outlived its launcher"
        os.close(rank)


QUIET = """
import ctypes, os, time
from pathlib import Path
Path(os.environ["RANK"]).touch()
time.sleep(1)  # as long as torch may take to load
from scalec.runtime.config.interrupts import end_at_once
end_at_once()
Path(os.environ["RANK"] + "heard").touch()
ctypes.CDLL(None).sleep(600)  # as a call that waits for other ranks, and in which Python takes no signal
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["at once", "loading", "waiting"])
def test_an_interrupt_before_a_run_begins_is_quiet(when: str, tmp_path: Path) -> None:
    """As Ctrl-C sends it, to the launcher and to its ranks; these load torch, or wait for each
    other.
    """
    files = {"at once": (), "loading": ("0", "1"), "waiting": ("0heard", "1heard")}[when]
    (tmp_path / "train.py").write_text(QUIET)
    starts = "from scalec.compiler.cli.command import torchrun\n"
    starts += "torchrun(['--standalone', '--nproc-per-node=2', 'train.py'], 2)"
    command = [sys.executable, "-c", starts]
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    until = monotonic() + 60
    while (
        not _is_blocked(started.pid)
        if not files
        else not all((tmp_path / file).exists() for file in files)
    ):
        assert started.poll() is None
        assert monotonic() < until
        sleep(0.02)
    os.killpg(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=HANGS)
    assert started.returncode == 130, err
    assert "Traceback" not in err


def _is_blocked(process: int) -> bool:
    """Whether a process has SIGINT blocked."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    mask = int(status.split("SigBlk:")[1].split()[0], 16)
    return bool(mask & 1 << (signal.SIGINT - 1))


def _failure(status: int, timestamp: int, told: str = "") -> Any:
    said = {"message": {"message": told}} if told else {"message": "<NONE>"}
    return SimpleNamespace(exitcode=status, timestamp=timestamp, error_file_data=said)


def test_the_first_rank_that_tells_why_explains_the_others() -> None:
    """Those that lose a killed rank name it; one that was stopped is killed last."""
    failures = {
        0: _failure(-9, 99),
        1: _failure(1, 101, "late"),
        2: _failure(1, 100, "early"),
        3: _failure(-15, 130),
    }
    assert find_first_failure(failures)[0] == 2


def test_where_nobody_tells_why_a_killed_rank_explains_the_others() -> None:
    assert (
        find_first_failure({0: _failure(1, 100), 1: _failure(-9, 101), 2: _failure(-15, 101)})[0]
        == 1
    )


@pytest.mark.parametrize("name", [each.name.replace("_", "-") for each in fields(Options)])
def test_torchrun_takes_no_option_of_the_program_for_its_own(name: str) -> None:
    """It refuses words that begin several of its options, also after the program's name."""
    given = get_args_parser().parse_args(["--nproc-per-node=2", "train.py", f"--{name}", "1"])
    assert given.training_script_args == [f"--{name}", "1"]
