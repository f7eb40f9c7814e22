"""Uses of training state in one step, as a trace has them."""

from contextlib import suppress

from teraplan.runtime.engine import state_log
from teraplan.runtime.engine.state_log import StateLog
from teraplan.runtime.state.memory.block import Block
from teraplan.values.step_trace import TensorKind
from tests.fakes.interrupts import InterruptAt

P, G, S = TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE


def block(kind: TensorKind, number: int, what: str) -> Block:
    return Block(
        key=(kind, number),
        what=what,
        shape=(3, 4),
        dtype="float32",
        address=4096 * number,
        nbytes=4096,
    )


def test_tensors_are_numbered_and_named_in_order_of_first_use() -> None:
    log = StateLog()
    first, second, state = block(P, 7, "parameter"), block(P, 3, "parameter"), block(S, 9, "m")
    for site, one in enumerate((second, first, second)):
        log.begin(one, site, changes=False)
        log.end(one, site)
    for one in (first, state):
        log.begin(one, 5, changes=True)
    assert log.blocks == [second, first, state]
    assert [log.number_of(one) for one in (second, first, state)] == [0, 1, 2]
    names = [tensor.name for tensor in log.tensors(6)]
    assert names == ["parameter 0", "parameter 1", "m of parameter 1"]
    assert log.name_of(block(P, 7, "parameter")) is None, "another tensor"


def test_uses_that_overlap_are_one() -> None:
    log, one = StateLog(), block(P, 0, "parameter")
    log.begin(one, 2, changes=False)
    log.begin(one, 4, changes=True)
    log.end(one, 5)
    log.end(one, 7)
    log.end(one, 8)
    log.end(block(P, 1, "parameter"), 8)  # has begun in the step before
    log.begin(one, 9, changes=False)
    (tensor,) = log.tensors(12)
    assert tensor.windows == ((2, 7), (9, 12)), "one that has not ended lasts as long as the step"
    assert tensor.changed_in == (0,)
    assert tensor.persistent


def test_a_gradient_of_the_step_ends_with_its_update() -> None:
    log, made, unused = StateLog(), block(G, 0, "gradient"), block(G, 1, "gradient")
    log.born(made, 3)
    log.born(unused, 4)
    log.begin(made, 6, changes=False)
    log.end(made, 8)
    first, second = log.tensors(9)
    assert first.windows == ((3, 4), (6, 8))
    assert first.changed_in == (0,)
    assert not first.persistent
    assert second.windows == ((4, 5), (9, 9)), "it stays the user's"


def test_a_gradient_of_the_step_before_may_have_changed_since() -> None:
    log, kept = StateLog(), block(G, 0, "gradient")
    log.begin(kept, 1, changes=True)
    log.end(kept, 2)
    log.begin(kept, 5, changes=False)
    log.end(kept, 6)
    (tensor,) = log.tensors(9)
    assert tensor.persistent
    assert tensor.changes == (0, 1)


def test_steps_that_use_the_state_otherwise_have_other_signatures() -> None:
    def signature(end: int) -> tuple[object, ...]:
        log, one = StateLog(), block(P, 0, "parameter")
        log.begin(one, 1, changes=False)
        log.end(one, end)
        return log.signature()

    assert signature(3) == signature(3) != signature(4)


def test_an_interrupt_anywhere_leaves_a_log_that_goes_on() -> None:
    file, num_tried = str(state_log.__file__), 0
    for at in range(1, 100):
        log, known, new = StateLog(), block(P, 7, "parameter"), block(P, 3, "parameter")
        log.begin(known, 0, changes=False)
        log.end(known, 1)
        interrupt = InterruptAt(at, file)
        with suppress(KeyboardInterrupt), interrupt:
            for one in (known, new):
                log.begin(one, 2, changes=False)
                log.end(one, 3)
        for one in (known, new):
            log.begin(one, 4, changes=True)
            log.end(one, 5)
        tensors = log.tensors(6)
        assert [log.number_of(one) for one in (known, new)] == [0, 1]
        assert all(tensor.windows[-1][1] in (5, 6) for tensor in tensors), "6: it has not ended"
        for tensor in tensors:
            ends = [site for window in tensor.windows for site in window]
            assert ends == sorted(ends)
        num_tried += 1
        if not interrupt.has_come:
            break
    assert num_tried > 30
