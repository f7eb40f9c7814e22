"""Steps unlike the others, and losses that are kept: neither decides what memory training needs."""

import itertools

import pytest
import torch

from teraplan.units import MIB
from tests.end_to_end.training import MLP, Program, Run, assert_same, run, tight, unlimited

STEPS = 10


def skipping(*bad: int) -> Program:
    """A program that passes over batches whose loss is not finite."""

    def program(this: Run) -> None:
        net = MLP()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            (x,) = net.batch(step)
            loss = net(x * float("nan") if step in bad else x)
            if not torch.isfinite(loss):
                continue
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [(1,), *(pytest.param(bad, marks=pytest.mark.exhaustive) for bad in ((1, 2), (0, 3)))],
    ids=str,
)
def test_batches_that_are_passed_over(bad: tuple[int, ...]) -> None:
    """While memory is measured, two forwards in one step need more than there is."""
    plain = tight(skipping(), unlimited(skipping()), 0.5)
    program = skipping(*bad)
    limited = run(program, **plain.options)
    assert_same(unlimited(program), limited)
    assert limited.final.phase == "planned"


@pytest.mark.slow
def test_evaluations_without_no_grad() -> None:
    """Steps go on without a plan where they keep to a budget that no plan keeps to."""

    def program(this: Run) -> None:
        net = MLP()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            for k in range(3):
                net(*net.batch(step + k)).item()
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    reference = unlimited(program)
    plan = next(s for s in reference.statuses if s.predicted_managed_peak_bytes >= 0)
    budget = plan.unlimited_peak_bytes - plan.predicted_managed_peak_bytes // 2
    limited = run(program, device_budget=budget, training_state="stays")
    assert_same(reference, limited)
    status = limited.statuses[-1]
    assert status.phase == "unplanned"
    assert "whose backward never does" in status.unplanned_because
    assert ["torch.no_grad()" in told for told in status.fallbacks] == [True]


@pytest.mark.slow
def test_steps_that_were_interrupted_while_they_were_measured() -> None:
    """Done anew they are as of two batches: each is unlike the one before, and tells it from it."""
    num_steps = 34

    def program(this: Run) -> None:
        net = MLP()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(num_steps):
            if step in (1, 3, 5, 7):
                torch.autograd.backward(net(*net.batch(step)))
                optimizer.zero_grad()
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    reference = unlimited(program, kernels="aot_eager")
    limited = tight(program, reference, 0.5, kernels="aot_eager")
    assert_same(reference, limited)
    phases = [status.phase for status in limited.statuses]
    assert phases[10] == "planned"
    assert phases[-1] == "planned"
    assert limited.final.fallbacks == ()


def growing(when: int, what: str) -> Program:
    """A program that takes memory for good in the step `when`, between forward and backward."""

    def program(this: Run) -> None:
        net, kept = MLP(), list[str]()
        this.compile(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number in range(STEPS):
            loss = net(*net.batch(number))
            if number >= when and what == "evaluates":
                with torch.no_grad():
                    net(net.batch(number)[0][:77])
            elif number == when and what == "loads":
                kept.extend(str(i) * 3 for i in range(200_000))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    return program


@pytest.mark.slow
@pytest.mark.parametrize("what", ["evaluates", "loads"])
@pytest.mark.parametrize("when", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_what_a_process_takes_for_good_is_no_need_of_a_step(what: str, when: int) -> None:
    """Code that is compiled for an evaluation, what a program keeps: neither comes every step."""
    plain = tight(growing(STEPS, what), unlimited(growing(STEPS, what)), 0.5)
    program = growing(when, what)
    limited = run(program, **plain.options)
    assert limited.final.phase == "planned"
    usual = plain.final.unlimited_peak_bytes
    assert limited.final.unlimited_peak_bytes < 1.1 * usual
    assert_same(unlimited(program), limited)


def watched(this: Run) -> None:
    """Evaluates without `no_grad` before each step, and keeps the loss until the next one."""
    net = MLP()
    this.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS + 6):
        kept = net(*net.batch(100 + step))
        loss = net(*net.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        this.record(loss, net, others=[kept.detach()])
        optimizer.zero_grad()


def test_a_loss_that_is_kept_merges_no_steps() -> None:
    reference = unlimited(watched)
    limited = tight(watched, reference, 0.5)
    assert_same(reference, limited)
    counts = [status.steps for status in limited.statuses]
    assert {after - before for before, after in itertools.pairwise(counts[8:])} == {1}
    assert limited.final.phase == "planned"


@pytest.mark.slow
def test_a_forward_that_waits_for_another_optimizer_stays_in_its_step() -> None:
    """As in a GAN: its backward comes after the other optimizer's step."""

    def program(this: Run) -> None:
        first, second = MLP(), MLP()
        this.compile(first)
        this.compile(second)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for step in range(STEPS):
            waiting = first(*first.batch(step))
            for batch in (step, 100 + step):
                torch.autograd.backward(second(*second.batch(batch)))
                optimizers[1].step()
                optimizers[1].zero_grad()
            torch.autograd.backward(waiting)
            optimizers[0].step()
            optimizers[0].zero_grad()
            this.record(waiting, first, second)

    reference = unlimited(program)
    limited = tight(program, reference, 0.6)
    assert_same(reference, limited)
    assert STEPS // 2 <= limited.final.steps <= STEPS


def test_what_a_program_has_held_for_some_steps_is_forgotten_some_steps_later() -> None:
    def program(this: Run) -> None:
        net = MLP()
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters())
        held = None
        for step in range(34):
            held = torch.ones(8 * MIB) if step == 8 else None if step == 11 else held
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            this.record(loss, net)

    limited = tight(program, unlimited(program), 0.6)
    while_held, last = limited.statuses[10], limited.statuses[-1]
    assert while_held.actual_peak_bytes > while_held.device_budget_bytes + 30 * MIB
    assert any(text.startswith("peak memory is") for text in while_held.fallbacks)
    assert last.actual_peak_bytes < 1.05 * last.device_budget_bytes + MIB
    assert not any(text.startswith("peak memory is") for text in last.fallbacks)
