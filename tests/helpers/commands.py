"""Runs the command line in this process, as the fixture `run_scalec`."""

import pytest
from attrs import frozen

from scalec.compiler import cli


@frozen
class CommandLine:
    """`scalec`, with what it writes caught by pytest."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Runs `scalec WORDS`, and returns its exit status, standard output and standard error."""
        try:
            status = cli.main(words)
        except SystemExit as end:  # as argparse ends
            status = int(end.code or 0)
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def output(self, *words: str) -> str:
        """The standard output of `scalec WORDS`, which must end with status 0."""
        status, out, err = self(*words)
        assert status == 0, err
        return out
