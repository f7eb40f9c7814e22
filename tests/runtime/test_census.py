"""Which tensors count as memory of the process."""

import gc
import threading
from typing import Any

import pytest
import torch

from teraplan.runtime.process import census
from teraplan.runtime.process.census import unfreeze


def test_what_a_compiler_has_traced_with_is_no_memory() -> None:
    before = census.tensor_nbytes("cpu")
    real = torch.ones(1000)
    traced = torch._to_functional_tensor(real)  # pyright: ignore[reportPrivateImportUsage]
    batched = torch.vmap(lambda row: [row])(real.reshape(10, 100))
    assert census.tensor_nbytes("cpu") == before + 4000
    assert all(storage.data_ptr() for storage in census.storages("cpu") if storage.nbytes())
    del traced, batched
    assert census.tensor_nbytes("cpu") == before + 4000


def test_the_state_of_a_parameter_is_what_its_optimizer_keeps_at_most() -> None:
    small, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [
        {"params": [small]},
        {"params": [other], "momentum": 0.5, "centered": True},
    ]
    optimizers = [
        torch.optim.SGD([small], lr=0.1),
        torch.optim.AdamW([small]),
        torch.optim.AdamW([small], amsgrad=True),
        torch.optim.RMSprop(groups),
    ]
    expected = [census.most_states(optimizer) for optimizer in optimizers]
    assert expected == [0, 2, 3, 3]
    for optimizer in optimizers:
        small.grad = other.grad = torch.ones(3)
        optimizer.step()
    kept = [
        max(sum(v.shape == (3,) for v in state.values()) for state in optimizer.state.values())
        for optimizer in optimizers[1:]
    ]
    assert kept == expected[1:]


def test_what_a_program_has_frozen_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that fork do so; no list of objects has what is frozen."""
    monkeypatch.setattr(census, "unfreeze", unfreeze)  # the one that other tests do without
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    gc.freeze()
    try:
        found = census.optimizers()
    finally:
        gc.unfreeze()
    assert any(one is optimizer for one in found)


class Marked(torch.Tensor):
    pass


class Stepping(torch.optim.SGD):
    pass


def test_what_refers_to_a_class_has_all_of_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_FEW_CLASSES", 1 << 20)  # other tests have left some
    weight = torch.nn.Parameter(torch.ones(3))
    hidden = (weight * 2).exp()  # saved for the backward, and in a cell
    kept = [weight, [torch.ones(3)], {"a": torch.ones(3).as_subclass(Marked)}, lambda: hidden]
    hidden.sum().backward()  # type: ignore[no-untyped-call]
    optimizers = [Stepping([weight], lr=0.1), torch.optim.AdamW([weight])]
    for kind, least in ((torch.Tensor, 5), (torch.optim.Optimizer, len(optimizers))):
        classes = list(census._with_subclasses(kind))
        (listed,) = census._with_instances_of(classes)
        everything = gc.get_objects()
        assert len(listed) < len(everything) // 5
        found = {id(one) for one in everything if type(one) in classes}
        assert {id(one) for one in census._instances(kind)} == found
        assert len(found) >= least
        del listed, everything
    assert kept


@pytest.mark.slow
def test_other_threads_are_not_disturbed() -> None:
    """Nobody else may hold a tuple that is being filled, or CPython raises a SystemError."""
    errors: list[SystemError] = []
    built, stopped = [0], threading.Event()

    def build() -> None:
        while not stopped.is_set():
            try:
                tuple(torch.Tensor for _ in range(3000))  # refers to a class that is looked for
                built[0] += 1
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(10):
            assert census.tensor_nbytes("cpu") >= 0
    finally:
        stopped.set()
        thread.join()
    assert built[0] > 0
    assert not errors
