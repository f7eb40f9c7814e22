"""A small training that is compiled and planned once, and then run again and again with faults.

Every round begins with the same parameters and a new storage, and has to end with the same bits or
with an error of ours; then the parameters have to be those after the last step that was finished.
"""

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import (
    EAGAIN,
    EDQUOT,
    EINTR,
    EIO,
    ENODEV,
    ENOSPC,
    EOPNOTSUPP,
    EROFS,
)
from pathlib import Path
from types import FrameType

import torch

from teraplan.errors import (
    BudgetExceededError,
    DeadlineError,
    InfeasibleBudgetError,
    StorageError,
)
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.session.step_faults import StepFaults
from teraplan.runtime.storage import Storage
from tests.end_to_end.conftest import forget_everything
from tests.end_to_end.training import MLP, bits, sessions
from tests.fakes.faulty_calls import Fault, injected

STEPS = 2
ROWS = 1024
PATIENCE_S = 60.0
"""How soon a disk moves what it has been given is up to all who use it."""
NAMED_ERRORS = (StorageError, DeadlineError, BudgetExceededError, InfeasibleBudgetError)
WRITE_FAULTS = (EIO, ENOSPC, EDQUOT, EROFS, ENODEV, EINTR, EAGAIN, "short", "slow")
READ_FAULTS = (EIO, ENODEV, EINTR, EAGAIN, "short", "slow", "flip", "end")
GROW_FAULTS = (ENOSPC, EDQUOT, EIO, EROFS, EOPNOTSUPP)
FAULTS = {"write": WRITE_FAULTS, "read": READ_FAULTS, "grow": GROW_FAULTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a round ended."""

    error: BaseException | None
    num_injected: int
    counts: dict[str, int]


class FaultyTraining:
    """A model under a plan with which tensors have to leave, and its steps without faults."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = tuple(directories)
        self._batches = [MLP(rows=ROWS).batch(step) for step in range(STEPS)]
        self._model = MLP(rows=ROWS)
        self._start = [p.detach().clone() for p in self._model.parameters()]
        quick: dict[str, object] = {"kernels": "aot_eager", "profile_steps": 1}
        self._compile_tightly(quick | {"training_state": "stays"})
        (self._session,) = [s for s in sessions() if s.steps]
        assert self._session.active is not None
        self._planned = self._session.active.schedule
        assert self._planned is not None
        self.reference: list[str] = []
        self._train(self.reference)
        digits = len(bits([]))
        self._states = [bits(self._start), *(both[digits:] for both in self.reference)]

    def _compile_tightly(self, options: dict[str, object]) -> None:
        """Under the least budget that works, and a little."""
        budget, share = 1 << 20, 0.9  # what is named before the first step has a margin
        for _ in range(6):
            forget_everything()
            self._model.compile(backend="teraplan", options=options | {"device_budget": budget})
            try:
                for _ in range(3):
                    self._train([])
            except InfeasibleBudgetError as error:
                budget, share = int(error.least_budget_bytes * share), 1.05
            else:
                return
        raise AssertionError(f"{budget} bytes, the least budget that works, does not")

    def interrupted_round(self, after_s: float) -> bool:
        """Trains until a signal after so many seconds; whether it came before the end."""
        self._start_anew()
        recorded: list[str] = []
        handler = signal.signal(signal.SIGALRM, _interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            self._train(recorded)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            gc.collect()
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            # An interrupt within PyTorch's own `no_grad` leaves gradients off for the whole thread.
            torch.set_grad_enabled(True)
            assert recorded == self.reference[: len(recorded)]
            self._check_left_nothing()
        return False

    def round(self, *faults: Fault, deadline_s: float = 5.0) -> Outcome:
        """Trains with faults; checks bits, the state that is left, and that nothing leaks."""
        self._start_anew(deadline_s)
        before = _held()
        recorded: list[str] = []
        error: BaseException | None = None
        with injected(*faults) as calls:
            try:
                self._train(recorded)
            except NAMED_ERRORS as caught:
                error = caught.with_traceback(None)
                gc.collect()
        assert recorded == self.reference[: len(recorded)], f"other bits after {faults}"
        assert error is not None or len(recorded) == STEPS
        self._check_state(len(recorded))
        self._check_left_nothing()
        assert _held() == before, "files or threads were left"
        return Outcome(error=error, num_injected=calls.num_injected, counts=calls.counts)

    def _check_left_nothing(self) -> None:
        self._session.engine.drop_all()
        storage = self._device().storage
        until_s = time.monotonic() + PATIENCE_S
        while storage.bytes_in_use and time.monotonic() < until_s:
            time.sleep(0.001)  # what was under way when the error came
        assert storage.bytes_in_use == 0, f"left in storage:\n{storage.describe()}"

    def _train(self, recorded: list[str]) -> None:
        with torch.no_grad():
            for parameter, start in zip(self._model.parameters(), self._start, strict=True):
                parameter.copy_(start)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        try:
            for batch in self._batches:
                loss = self._model(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorded.append(bits([loss]) + bits(self._model.parameters()))
        finally:
            optimizer.zero_grad()

    def _check_state(self, num_steps: int) -> None:
        """Whoever saves the parameters after an error saves those of the last whole step."""
        assert bits(self._model.parameters()) == self._states[num_steps]

    def _start_anew(self, deadline_s: float = 5.0) -> None:
        device, session = self._device(), self._session
        session.engine.drop_all()  # to the storage that it came from
        device.storage.close()
        device.tiers.storage = Storage.open(
            self._directories, deadline_s=deadline_s, without_python=True
        )
        session._error, session._fault = None, ""
        session._faults = StepFaults(session.engine)
        session.engine.mover.faults = []
        if session.active is not None:
            session.active.schedule = self._planned

    def _device(self) -> CpuDevice:
        device = self._session.device
        assert isinstance(device, CpuDevice)
        return device


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def random_faults(seed: int) -> list[Fault]:
    """One to four faults; `seed` tells them all."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(chance.randint(1, 4)):
        call = chance.choice(["write", "write", "read", "read", "grow"])
        faults.append(
            Fault(
                call=call,
                what=chance.choice(FAULTS[call]),
                at=chance.randint(1, 2 if call == "grow" else 14),
                times=chance.choice([1, 1, 1, 2, 3, 10**9]),
            )
        )
    return faults
