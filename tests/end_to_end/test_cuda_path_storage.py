"""Optimizer state that leaves a GPU for storage, where host memory has no room for all state."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import teraplan
from teraplan import backend
from teraplan.errors import StorageError
from teraplan.runtime.cuda.copies import CudaCopy
from teraplan.runtime.cuda.storage_pointers import why_not
from teraplan.runtime.cuda.swapped_memory import SwappedMemory
from teraplan.runtime.state.memory.block import Block
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration
from teraplan.values.step_trace import TensorKind
from tests.end_to_end import moving
from tests.end_to_end.moving import adamw, model
from tests.end_to_end.test_state_plan import planned_case
from tests.end_to_end.training import MLP, UNLIMITED, Program, Run, assert_same, run
from tests.fakes import faulty_calls
from tests.fakes.faulty_calls import Fault

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

training = partial(moving.training, drops_gradients=True)

HOST_BYTES = 11 << 18
"""Parameters and gradients have room there, and little else."""


@pytest.fixture(autouse=True)
def little_host_memory(
    cuda_path: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], None]:
    monkeypatch.setattr(moving, "states", shown)
    cuda_path(HOST_BYTES)
    return cuda_path


@pytest.fixture
def all_stored(little_host_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is host memory for all, and optimizer state goes to storage nevertheless."""
    little_host_memory(64 << 20)
    send = SwappedMemory._sent

    def sent(self: SwappedMemory, block: Block, host_bytes: int | None) -> CudaCopy:
        stored = block.key[0] is TensorKind.OPTIMIZER_STATE
        return send(self, block, 0 if stored else host_bytes)

    monkeypatch.setattr(SwappedMemory, "_sent", sent)


def shown(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state as its `state_dict` has it."""
    of_parameters: dict[Any, dict[str, Any]] = optimizer.state_dict()["state"]
    values = [value for state in of_parameters.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def memory() -> SwappedMemory:
    found = moving.moving().arena.memory
    assert isinstance(found, SwappedMemory)
    return found


def check(program: Program, *, budget: int = moving.BUDGET, **options: object) -> Run:
    """The same bits with optimizer state in storage."""
    reference = run(program, device_budget=UNLIMITED, training_state="stays", **options)
    limited = moving.run_least(program, budget, **options)
    assert_same(reference, limited)
    traffic = moving.moving().arena.log.traffic
    assert traffic.written_bytes > 0 < traffic.read_bytes
    assert limited.final.phase == "planned"
    return limited


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_optimizer_state_goes_to_storage_under_a_plan(kernels: str) -> None:
    check(training(adamw), kernels=kernels)
    _, plan = planned_case()
    stored = {plan.trace.tensors[m.tensor_id].kind for m in plan.migrations if not is_in_host(m)}
    assert stored <= {TensorKind.ACTIVATION, TensorKind.OPTIMIZER_STATE}


def is_in_host(migration: Migration) -> bool:
    return migration.tier is Tier.HOST


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "set_to_none"), [(2, True), (1, False)])
@pytest.mark.usefixtures("all_stored")
def test_accumulation_and_clipping(accumulate: int, set_to_none: bool) -> None:
    program = training(adamw, accumulate=accumulate, clip=0.01, set_to_none=set_to_none)
    check(program, budget=7 << 19)


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored")
def test_saved_and_loaded_between_steps() -> None:
    """Also in plain PyTorch, where the bits are the same."""

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        plain = adamw(model().parameters())
        plain.load_state_dict(saved)
        assert all(map(torch.equal, shown(plain), shown(optimizer)))
        if step % 2:
            optimizer.load_state_dict(saved)

    check(training(adamw, between=between, steps=8))


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored")
def test_what_nobody_can_read_says_so() -> None:
    hidden: list[str] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        for state, parameter in zip(optimizer.state.values(), net.parameters(), strict=True):
            try:
                state["exp_avg"].norm()
            except RuntimeError as error:
                hidden.append(str(error))
                with pytest.raises(RuntimeError, match="is in storage"):
                    state["exp_avg"].zero_()
                assert state["exp_avg"].shape == parameter.shape

    moving.run_least(training(adamw, between=between), moving.BUDGET)
    assert hidden
    assert all("exp_avg" in text and "optimizer.state_dict()" in text for text in hidden)


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored")
def test_what_was_read_keeps_its_values() -> None:
    """A `state_dict` is a picture of its moment, while plain tensors would go on changing."""
    kept: list[tuple[list[Tensor], list[Tensor]]] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        found = [t for t in shown(optimizer) if t.nbytes > 1 << 16]
        here = {id(v) for state in optimizer.state.values() for v in state.values()}
        views = [t for t in found if id(t) not in here]
        for view in views:
            view.add_(1)  # is nobody else's
        kept.append((views, [t.clone() for t in views]))

    check(training(adamw, between=between, steps=8))
    for views, values in kept:
        assert all(map(torch.equal, views, values))
    assert any(views for views, _ in kept)


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored")
def test_a_detached_optimizer_has_its_state_in_memory() -> None:
    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 4:
            teraplan.detach(optimizer)
        if step == 5:
            for state in optimizer.state.values():
                assert state["exp_avg"].isfinite().all()
        if step == 6:
            teraplan.attach(optimizer)

    check(training(adamw, between=between, steps=9))


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored")
def test_what_is_kept_after_the_session_has_its_bits() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        states = [v for state in optimizer.state.values() for v in state.values()]
        kept[:] = [(v, s.clone()) for v, s in zip(states, shown(optimizer), strict=True)]

    moving.run_least(training(adamw, between=keep), moving.BUDGET)
    assert any(not block.held for block in memory().blocks)
    for session in backend.sessions():
        session.close()
    assert all(torch.equal(tensor, values) for tensor, values in kept)


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored")
def test_a_write_that_fails_loses_nothing() -> None:
    """Without another store the error has a name, and all state can still be saved."""
    saved: list[bool] = []
    plain = run(training(adamw), device_budget=UNLIMITED, training_state="stays")

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(6):
            fault = Fault(call="write", what=5, at=1, times=10_000)
            with faulty_calls.injected(*([fault] if step == 4 else [])):
                try:
                    loss = net(*net.batch(step))
                    torch.autograd.backward(loss)
                    optimizer.step()
                except StorageError:
                    saved.append(all(t.isfinite().all() for t in shown(optimizer)))
                    return
            optimizer.zero_grad()
            this.record(loss, net, others=shown(optimizer))

    limited = moving.run_least(program, moving.BUDGET)
    assert saved in ([], [True])
    assert limited.recorded == plain.recorded[: len(limited.recorded)]


@pytest.mark.slow
def test_encrypted_it_stays_on_the_host(little_host_memory: Callable[[int], None]) -> None:
    little_host_memory(64 << 20)
    pytest.importorskip("cryptography")
    limited = moving.run_least(training(adamw), moving.BUDGET, encrypt=True)
    assert not memory().hides
    assert limited.final.state_to_host_bytes > 0
    assert limited.final.state_written_bytes == 0


@pytest.mark.slow
def test_without_a_compiler_it_stays_on_the_host_and_says_so(
    little_host_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    little_host_memory(64 << 20)
    from teraplan.runtime.cuda import device as cuda_device

    monkeypatch.setattr(cuda_device, "why_not_raising", lambda: "there is no compiler")
    limited = moving.run_least(training(adamw), moving.BUDGET)
    assert limited.final.state_written_bytes == 0
    text = "optimizer state goes to host memory alone: there is no compiler"
    assert text in limited.final.fallbacks
