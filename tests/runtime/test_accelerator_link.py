"""The speed of the link to a GPU, with streams that are threads."""

from pathlib import Path

import pytest
import torch

from teraplan.runtime import links
from teraplan.runtime.cuda import link as accelerator_link
from teraplan.runtime.cuda import torch_runtime
from teraplan.runtime.cuda.link import measure_link
from teraplan.runtime.process import process_memory
from teraplan.units import GIB, MIB
from tests.fakes.fake_cuda import FakeCuda

FREE = [(GIB, 64 * GIB, 32 * MIB), (8 * GIB, 128 * MIB, 4 * MIB), (16 * MIB, GIB, MIB)]
"""On the device and on the host, and how large a block may then be."""


class Watched(FakeCuda):
    """Notes the most host memory that was pinned at once."""

    most_pinned = 0

    def pin(self, address: int, nbytes: int) -> str:
        reason = super().pin(address, nbytes)
        self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))
        return reason


@pytest.mark.parametrize("why_not_pinned", ["", "not permitted"])
@pytest.mark.parametrize(("on_device", "on_host", "block_bytes"), FREE)
def test_measuring_takes_a_small_part_of_what_is_free_and_keeps_nothing(
    on_device: int,
    on_host: int,
    block_bytes: int,
    why_not_pinned: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "available_bytes", lambda: on_host)
    monkeypatch.setattr(accelerator_link, "_COPIED_BYTES", 64 * MIB)
    cuda = Watched(slowest_s=0.0, why_not_pinned=why_not_pinned)
    cuda.free_device_bytes = on_device
    torch.set_default_device("meta")  # as a program may set "cuda"
    try:
        link = measure_link(cuda)
    finally:
        torch.set_default_device(None)
    assert 10**7 < link.out_while_back_bytes_per_s <= link.out_bytes_per_s < 10**13
    assert 10**7 < link.back_while_out_bytes_per_s <= link.back_bytes_per_s < 10**13
    assert cuda.allocated("peak") == 2 * block_bytes
    assert cuda.most_pinned == (0 if why_not_pinned else 2 * block_bytes)
    assert not cuda.pinned
    assert cuda.allocated("current") == 0
    assert cuda.calls[-1] == ("empty_cache", "")
    cuda.close()


def test_a_device_that_fails_keeps_nothing_either() -> None:
    cuda = Watched(slowest_s=0.0)
    cuda.error_after_copy = "an illegal memory access"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure_link(cuda)
    assert not cuda.pinned
    cuda.close()


def test_the_link_is_that_of_the_gpu_that_is_named_or_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made up")
    monkeypatch.setattr(accelerator_link, "_COPIED_BYTES", 64 * MIB)
    opened: list[tuple[int, FakeCuda]] = []

    def open_one(index: int) -> FakeCuda:
        opened.append((index, FakeCuda(slowest_s=0.0)))
        return opened[-1][1]

    monkeypatch.setattr(torch_runtime, "TorchCuda", open_one)
    measured = links.host_link()
    assert measured == links.host_link("cuda:3"), "remembered"
    links.host_link("cuda:1")
    assert [index for index, _ in opened] == [3, 1]
    for _, cuda in opened:
        cuda.close()
