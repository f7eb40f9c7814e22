"""Training as users write it, in this process: one thread, so that every run has the same bits."""

import gc
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from teraplan import backend
from teraplan.config import Config
from teraplan.planners.search import rungs, small_step, stall_driven
from teraplan.runtime.process import census
from teraplan.runtime.session import plan_maker
from teraplan.runtime.state.host_updates import host_choice
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from tests.end_to_end.cuda_path import STAGING, CudaPath


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> Iterator[None]:
    """What has been imported is no garbage: collections between tests need not look at it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="package", autouse=True)
def _stays_frozen() -> Iterator[None]:
    """What is frozen here is of other tests, and no test counts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Also for what is run once for all tests of a module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No compiled graph or session that outlives its test."""
    # pytest's log handler would make torch write down every guard of every graph.
    logging.getLogger("torch.__trace").setLevel(logging.CRITICAL)
    gc.freeze()  # what is still there is no garbage, and no test's training state
    with pytest.MonkeyPatch.context() as patch:  # as much as what a small model saves
        patch.setattr(plan_maker, "MEASURED_WITHIN_BYTES", 0)
        # Any plan will do, and the best takes time.
        patch.setattr(small_step, "_SIMULATIONS", 5)
        patch.setattr(stall_driven, "_WORK", 0)
        patch.setattr(rungs, "_RUNGS", 1)
        yield
    forget_everything()


def forget_everything() -> None:
    """Drop all compiled graphs, and with them their sessions."""
    torch._dynamo.reset()
    gc.collect()
    for session in backend.sessions():
        session.close()
    backend._held.clear()


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on a real disk, wherever pytest's own temporary directory is."""
    directory = Path(tempfile.mkdtemp(prefix="teraplan-test-", dir=default_directory()))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def cuda_path(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sessions get a `CudaPath`; the function sets how much host memory there is."""

    def let_have(host_bytes: int) -> None:
        def open_device(config: Config, place: torch.device) -> CudaPath:
            assert place.type == "cpu"
            storage = Storage.open([default_directory()], encrypt=config.encrypt)
            return CudaPath(storage, STAGING + host_bytes)

        monkeypatch.setattr(backend, "open_device", open_device)

    let_have(64 * MIB)
    return let_have


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates on the host have several buckets in each step, which take turns in two slots."""
    monkeypatch.setattr(host_choice, "BUCKET_BYTES", 200_000)
