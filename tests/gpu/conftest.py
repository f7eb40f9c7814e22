"""On a GPU: kernels that repeat exactly, and a fresh start for every test."""

import gc
from collections.abc import Iterator

import pytest
import torch

from teraplan import backend


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels; no session and no cached memory of an earlier test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch._dynamo.reset()
    gc.collect()
    for session in backend.sessions():
        session.close()
    backend._held.clear()
    torch.cuda.empty_cache()
