"""The libraries that a run on GPUs names: here of a GPU that only pretends."""

from typing import Any

import pytest
import torch
from torch import Tensor

from scalec.runtime.config.versions import library_lines


def test_a_cpu_has_nothing_to_say() -> None:
    assert not [*library_lines(torch.device("cpu"))]


@pytest.mark.parametrize("usable", [True, False])
def test_a_gpu_says_what_serves_it(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def cudnn() -> int:
        if not usable:
            raise RuntimeError("cuDNN version incompatibility:\nfound 9.1.0")
        return 91501

    def choice(q: Tensor, *_: Tensor, is_causal: bool) -> int:
        assert is_causal
        assert q.dtype == torch.bfloat16
        return 3 if q.shape[-1] == 128 else 1

    made: Any = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **named: made(*size, **named))
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.backends.cudnn, "version", cudnn)
    version = "91501" if usable else "unusable (cuDNN version incompatibility: found 9.1.0)"
    assert [*library_lines(torch.device("cuda", 0))] == [
        f"NVIDIA H100: torch {torch.__version__}, CUDA 13.0, NCCL 2.28.9, cuDNN {version}",
        "causal attention of bfloat16 heads: 64 wide flash_attention, 128 wide cudnn_attention",
    ]


def test_torch_answers_as_it_is_asked() -> None:
    q: Any = torch.empty(1, 8, 256, 64, dtype=torch.bfloat16)
    choose: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009
    assert choose(q, q, q, is_causal=True) in range(4)
