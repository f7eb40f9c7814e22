"""Gradients that go to the host in the backward: equal bits, whoever changes them afterwards."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.host_lane import PlainLane
from teraplan.runtime.state.host_updates.early_gradients import sums_of
from tests.end_to_end.hosting import all_host_updates, check, host_updates, hosted, plain
from tests.end_to_end.moving import STEPS, adamw, gradients, looping, model, training
from tests.end_to_end.training import MLP, Run, assert_same

pytestmark = pytest.mark.usefixtures("small_buckets")

Change = Callable[[nn.Module], None]


@pytest.fixture(autouse=True)
def host_is_another_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As beside a GPU: where the device is the host itself nothing is gained by it."""
    monkeypatch.setattr(CpuDevice, "has_host_beside", True)
    yield


def sent(found: Run) -> list[int]:
    """Gradients that were on the host before the optimizer began, step by step."""
    return [status.host_gradients_sent_early for status in found.statuses]


@pytest.mark.slow
def test_all_are_there_once_there_is_state() -> None:
    found = check(training(adamw))
    assert sent(found) == [0, 0, *[3] * (STEPS - 2)]
    assert "3 gradients sent in the backward" in str(found.statuses[-1])
    assert found.statuses[-1].graphs == found.statuses[0].graphs, "nothing is compiled again"


@pytest.mark.slow
def test_the_last_of_several_backwards_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy_out = PlainLane.out

    def out(lane: PlainLane, source: Tensor, target: Tensor) -> Callable[[], None]:
        copied.append(source.nbytes)
        return copy_out(lane, source, target)

    monkeypatch.setattr(PlainLane, "out", out)

    def between(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        numbers.append(len(copied))
        copied.clear()

    numbers: list[int] = []
    found = check(training(adamw, accumulate=3, between=between))
    assert set(sent(found)[3:]) == {3}
    assert numbers[-2:] == [6, 6], "three values and three gradients"


@pytest.mark.slow
def test_gradients_that_stay_where_they_are() -> None:
    found = check(training(adamw, set_to_none=False))
    assert set(sent(found)[3:]) == {3}


def _quietly_scaled(net: nn.Module) -> None:
    for gradient in gradients(net):
        gradient.data.mul_(0.5)


def _through_numpy(net: nn.Module) -> None:
    for gradient in gradients(net):
        gradient.numpy()[...] *= -1


def _one_element(net: nn.Module) -> None:
    for gradient in gradients(net):
        gradient.data.view(-1)[-1] = 3.0


def _in_place(net: nn.Module) -> None:
    for gradient in gradients(net):
        gradient.mul_(2)


def _replaced(net: nn.Module) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = torch.full_like(parameter.grad, 0.25)


def _in_another_order(net: nn.Module) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.t().contiguous().t() if parameter.ndim > 1 else None


LATER = (_through_numpy, _in_place, _in_another_order)
CHANGES = (
    *(_quietly_scaled, _one_element, _replaced),
    *(pytest.param(change, marks=pytest.mark.slow) for change in LATER),
)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_since_goes_again(change: Change) -> None:
    def step_of(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss: Tensor = net(*net.batch(step))
        torch.autograd.backward(loss)
        if step in (3, 5):
            change(net)
        optimizer.step()
        return loss

    program = looping(step_of, steps=8)
    found = hosted(program)
    assert_same(plain(program), found)
    assert sent(found)[2:] == [3, 0, 3, 0, 3, 3]


def test_where_all_is_changed_nothing_is_sent_any_more() -> None:
    found = check(training(adamw, clip=0.01))
    assert set(sent(found)) == {0}
    early = host_updates()._early
    assert not list(early._known), "no hook is left"


@pytest.mark.slow
def test_two_optimizers_that_step_in_turns() -> None:
    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        parameters = list(net.parameters())
        optimizers = [adamw(parameters[:6]), adamw(parameters[6:])]
        for step in range(STEPS):
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            numbers = []
            for optimizer in optimizers:
                optimizer.step()
                numbers.append(teraplan.status().host_gradients_sent_early)
            if step > 1 and this.options.get("host_updates"):
                assert numbers == [2, 2]
            this.record(loss, net)
            net.zero_grad()

    reference = plain(program)
    assert_same(reference, hosted(program, share=0.6))


@pytest.mark.slow
def test_without_room_on_the_host_they_go_with_their_buckets() -> None:
    gradient = 192 * 192 * 4
    slots, state_made_at_once = 4 * 202_000, 2 * 202_000
    room = 3 * 2 * (gradient + 4096) + slots + state_made_at_once + 16384
    found = check(training(adamw), host_budget=room)
    assert sent(found)[-1] == 2, "as many as there was state at once in the first update"


@pytest.mark.slow
def test_loaded_and_detached() -> None:
    known: list[int] = []

    def between(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 4:
            teraplan.detach(optimizer)
        known.extend(len(updates._early._known) for updates in all_host_updates())

    program = training(adamw, between=between, steps=7)
    assert_same(plain(program), hosted(program))
    assert known == [0, 3, 3, 0, 3, 0, 0]


def test_sums_see_each_element() -> None:
    tensor = torch.randn(3000)
    sums = sums_of(tensor)
    for at in (0, 1023, 1024, 2999):
        changed = tensor.clone()
        changed[at] = -changed[at]
        assert not torch.equal(sums_of(changed), sums)
    assert torch.equal(sums_of(tensor.clone()), sums)
    odd = torch.randn(1501).bfloat16()
    assert not torch.equal(sums_of(odd), sums_of(odd * 2))
