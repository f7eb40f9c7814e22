"""Updates on the host's cores when something goes wrong, or memory is short."""

import _thread
import signal
import threading
import time
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from teraplan.errors import DeadlineError, FallbackRefusedError, HostUpdateError, StorageFullError
from teraplan.runtime.state.host_updates import host_choice, host_step, host_worker
from teraplan.runtime.state.memory.host_memory import host_bytes
from tests.end_to_end.hosting import all_host_updates, check, host_updates, hosted, plain
from tests.end_to_end.moving import STEPS, adamw, looping, model, training, weight
from tests.end_to_end.test_state_optimizers import Lion
from tests.end_to_end.training import MLP, Run, assert_same

pytestmark = pytest.mark.usefixtures("small_buckets")

WEIGHT = 192 * 192 * 4


class Faulty(Lion):
    """Does `fault` in the thread that updates on the host, or in the training thread."""

    def __init__(self, parameters: Iterable[Tensor], *, in_worker: bool) -> None:
        super().__init__(parameters)
        self.in_worker = in_worker
        self.error: BaseException | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        in_worker = threading.current_thread() is not threading.main_thread()
        if self.error is not None and in_worker == self.in_worker:
            raise self.error
        super().step()


@pytest.mark.parametrize("in_worker", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        *(pytest.param(e, marks=pytest.mark.slow) for e in (KeyboardInterrupt(), SystemExit(3))),
    ],
)
def test_a_step_that_raises_leaves_the_optimizer_whole(
    in_worker: bool, error: BaseException
) -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        parameters = list(net.parameters())
        optimizer = Faulty(parameters, in_worker=in_worker)
        for step in range(4):
            torch.autograd.backward(net(*net.batch(step)))
            optimizer.error = error if step == 2 else None
            if step != 2:
                optimizer.step()
            else:
                before = [p.detach().clone() for p in parameters]
                named = in_worker and isinstance(error, Exception)
                with pytest.raises(HostUpdateError if named else type(error)) as raised:
                    optimizer.step()
                if named:
                    assert ".weight, 192x192) on the host failed: ValueError" in str(raised.value)
                    assert raised.value.__cause__ is error
                    on_host = list(host_updates().placement._placed[optimizer].chosen)
                    for p, old in zip(parameters, before, strict=True):
                        assert torch.equal(p, old) or not any(p is q for q in on_host)
            assert optimizer.param_groups[0]["params"] == parameters
            assert len(optimizer.state_dict()["state"]) == len(parameters)
            optimizer.zero_grad()
            assert all(p.grad is None for p in parameters)
        assert host_updates().last.num_updates == 3

    hosted(program)


def test_an_interrupt_while_waiting_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket under way comes to its end, no other begins, and the interrupt is raised."""
    update = host_step.HostStep._update
    interrupting = False

    def slow(self: host_step.HostStep, twins: list[object]) -> None:
        if interrupting:
            _thread.interrupt_main()
            end = time.monotonic() + 30
            while not self.stopped and time.monotonic() < end:
                time.sleep(0.01)
        update(self, twins)  # type: ignore[arg-type]

    monkeypatch.setattr(host_step.HostStep, "_update", slow)

    def program(this: Run) -> None:
        nonlocal interrupting
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(3):
            torch.autograd.backward(net(*net.batch(step)))
            interrupting = step == 1
            if interrupting:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                assert host_updates().last.num_updates == 1
            else:
                optimizer.step()
        assert host_updates().last.num_updates == 3

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        hosted(program)
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.slow
def test_a_thread_that_hangs_or_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def hang(self: host_step.HostStep, *, in_worker: bool) -> None:
        assert in_worker
        assert let_go.wait(20)
        self.ended.set()

    monkeypatch.setattr(host_step.HostStep, "run", hang)
    with pytest.raises(
        DeadlineError, match=r"on the host has not ended in 0.2 s; raise deadline_s"
    ):
        hosted(training(adamw), deadline_s=0.2)
    let_go.set()
    monkeypatch.setattr(host_worker, "_work", lambda queue: None)
    with pytest.raises(HostUpdateError, match=r"thread .* has ended .* go back to a checkpoint"):
        hosted(training(adamw))


def test_a_small_host_budget_takes_fewer() -> None:
    """Two slots, and two state tensors for each: what is taken never exceeds the budget."""
    program = training(adamw)
    reference = plain(program)
    few = hosted(program, share=1.0, host_budget=10 * WEIGHT)
    assert_same(reference, few)
    pool = host_updates().placement.state.pool
    assert 4 * WEIGHT < pool.most_bytes <= pool.limit_bytes <= 10 * WEIGHT
    final = few.statuses[-1]
    assert 1 <= final.host_updates < 6
    assert final.host_state_bytes == final.host_updates * 2 * WEIGHT
    assert any("raise host_budget" in text for text in final.fallbacks)


@pytest.mark.slow
def test_no_host_budget() -> None:
    """On a CPU there is none unless it is given."""
    program = training(adamw)
    found = hosted(program, host_budget=None)
    assert_same(plain(program), found)
    assert {s.host_updates for s in found.statuses} == {0}
    with pytest.raises(FallbackRefusedError, match=r"strict is set, and .* raise host_budget"):
        hosted(program, host_budget=0, strict=True)


def test_state_that_is_larger_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes back to the device where there is no room, and the rest goes on."""
    nothing = {"missing_bytes": lambda optimizer: {}, "_needs": lambda *_: 0}
    for name, instead in nothing.items():
        monkeypatch.setattr(host_choice, name, instead)
    monkeypatch.setattr(host_choice, "state_bytes", lambda optimizer, _: dict.fromkeys(range(1), 0))
    program = training(adamw)
    reference = plain(program)
    found = hosted(program, share=1.0, host_budget=9 * WEIGHT)
    assert_same(reference, found)
    assert found.statuses[0].host_updates == 6
    assert 1 <= found.statuses[-1].host_updates <= 2, "of nine weights' bytes slots take five"
    pool = host_updates().placement.state.pool
    assert pool.most_bytes <= 9 * WEIGHT


def test_what_has_taken_the_room_meanwhile_leaves_updates_on_the_device() -> None:
    """Between the choice and the first update: what moves goes to host memory, too."""

    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        if step == 0 and all_host_updates():
            updates = host_updates()
            updates._place(optimizer, 1.0)
            pool = updates.placement.state.pool
            taken.append(host_bytes(pool, pool.free_bytes - 5 * WEIGHT))
        optimizer.step()
        return loss

    taken: list[Tensor | None] = []
    program = looping(step_of)
    reference = plain(program)
    found = hosted(program, share=1.0)
    assert_same(reference, found)
    assert taken[0] is not None
    assert [s.host_updates for s in found.statuses] == [1] * STEPS, "its state is there twice"
    assert any("of which" in text for text in found.statuses[-1].fallbacks)


def test_no_room_for_the_first_update_is_an_error_before_anything_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_step, "host_bytes", lambda *_: None)

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        torch.autograd.backward(net(*net.batch(0)))
        last = weight(net, 5)
        before = last.detach().clone()
        with pytest.raises(StorageFullError, match=r"first update of .* raise host_budget"):
            optimizer.step()
        assert torch.equal(last, before)

    hosted(program)


def test_memory_comes_back_with_the_optimizer() -> None:
    check(training(adamw), share=1.0, updates=6)
    updates = host_updates()
    assert updates.placement.state.nbytes == 0, "the program's optimizer is gone"
    updates.close()
    assert updates.placement.state.pool.in_use_bytes == 0
