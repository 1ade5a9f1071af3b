"""The address of rank 0 is looked up before torch, which tries in silence for as long as a step
may take.
"""

import socket
from time import monotonic
from typing import Any

import pytest

from scalec.runtime.comm import address
from scalec.runtime.comm.address import await_address
from scalec.runtime.errors import RunError


def test_an_address_that_cannot_be_resolved_is_said_within_ten_seconds() -> None:
    assert address.WARNING_AFTER < 10


@pytest.mark.sample(1)
@pytest.mark.parametrize("says", [False, True])
def test_such_an_address_is_said_once_and_given_up(
    says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    began = monotonic()
    with pytest.raises(
        RunError, match=r"MASTER_ADDR is `nowhere\.invalid`, which this machine cannot resolve"
    ):
        await_address("nowhere.invalid", says, said_after=1.0, longest=1.5)
    assert monotonic() - began < 5
    assert capsys.readouterr().err.count("warning: MASTER_ADDR is `nowhere.invalid`") == says


def test_a_resolver_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep_on(*_: Any) -> None:
        socket.create_server(("127.0.0.1", 0)).accept()

    monkeypatch.setattr(socket, "getaddrinfo", sleep_on)
    with pytest.raises(
        RunError, match="MASTER_ADDR is `somewhere`, for which no resolver has answered"
    ):
        await_address("somewhere", False, said_after=0.1, longest=0.2)


def test_a_name_that_comes_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = list[str]()

    def appear(host: str, _port: None) -> None:
        tries.append(host)
        if len(tries) < 3:
            raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", appear)
    monkeypatch.setattr(address, "_BETWEEN", 0.01)
    await_address("pod-0", True, said_after=5.0, longest=6.0)
    assert tries == ["pod-0"] * 3
    assert not capsys.readouterr().err
