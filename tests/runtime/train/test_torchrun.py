"""The last line of a run that fails says why, below torchrun's report."""

import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest

from helpers.forked_ranks import HANGS

ENDING = "from scalec.runtime.train.shutdown import ending\nfrom scalec.runtime.errors import RunError\nwith ending(): "
KILLED = (
    "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(600)"
)
PROGRAMS = {
    f"{ENDING}raise RunError('no data')": "error: no data",
    f"{ENDING}raise ValueError('too many\\nlines')": f"error: rank 0 on {gethostname()}: ValueError: too many lines",
    KILLED: "error: rank 1 was ended by SIGKILL",
    "import sys; sys.exit(3)": "error: rank 0 ended with exit status 3",
}


@pytest.mark.sample(2)
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
