"""Makes sites of a step of the uses of its training state, and does there what a plan says of it.

    acquire, a bucket begins    need    what the plan says, then what is used comes, if it is away
    release, a bucket ends      done    the use is over, then what the plan says
    settle                      save    what the plan says, then the gradient is made

Whatever a plan says: what is used is brought, and no more is held than is left of the budget.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from teraplan.runtime.engine.recorder import SiteKey
from teraplan.runtime.engine.schedule import NOTHING, Schedule
from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.values.step_trace import UPDATE_GRAPH, SiteKind, TensorKind

if TYPE_CHECKING:
    from teraplan.runtime.engine.engine import Engine


class StateSites:
    """Between one training state and the engine that runs its steps."""

    def __init__(self, engine: "Engine", state: TrainingState) -> None:
        self._engine = engine
        self._state = state

    # -- what the training state tells -----------------------------------------------------------

    def use(
        self, blocks: Sequence[Block], bring: Callable[[], None], *, changes: bool, update: bool
    ) -> None:
        """Blocks are about to be used; `bring` brings them."""
        recorder = self._engine.recorder
        if recorder is None:
            bring()
            return

        def begin(site: int) -> None:
            for block in blocks:
                recorder.state.begin(block, site, changes=changes and _changes(block, update))
                self._note(block)

        number = recorder.state.number_of(blocks[0])
        key = self._key(SiteKind.NEED, number, update=update)
        self._engine.visit(key, begin, lambda _: bring())

    def end_use(self, blocks: Sequence[Block], done: Callable[[], None], *, update: bool) -> None:
        """Blocks have been used, which `done` says."""
        recorder = self._engine.recorder
        if recorder is None:
            done()
            return

        def end(site: int) -> None:
            for block in blocks:
                recorder.state.end(block, site)
            done()

        number = recorder.state.number_of(blocks[0])
        self._engine.visit(self._key(SiteKind.DONE, number, update=update), end, _nothing)

    def make(self, make: Callable[[], Block]) -> None:
        """A block is made, and has been used."""
        recorder = self._engine.recorder
        if recorder is None:
            make()
            return
        number = recorder.state.next_number

        def born(site: int) -> None:
            block = make()
            recorder.state.born(block, site)
            self._note(block)

        self._engine.visit(self._key(SiteKind.SAVE, number, update=False), _nothing, born)

    # -- what the engine tells -------------------------------------------------------------------

    @property
    def in_use_bytes(self) -> int:
        """What training state takes now."""
        return self._state.arena.in_use_bytes

    def begin_step(self, schedule: Schedule | None) -> None:
        """A step begins, under a plan or without one."""
        follows = schedule is not None and schedule.moves_state
        host_bytes = schedule.plan.prediction.host_peak_bytes if schedule is not None else 0
        self._state.follow_plan(follows, host_bytes=host_bytes)
        self._state.arena.log.clear()

    def diverge(self) -> int:
        """The step goes on without its plan; returns the most that training state takes then."""
        self._state.arena.user_may_run()
        self._state.follow_plan(False)
        return self._state.limit_bytes

    def act(self, schedule: Schedule, site: int) -> None:
        """Do what the plan says of training state at a site."""
        actions, arena = schedule.actions.get(site, NOTHING), self._state.arena
        for block, host_bytes in schedule.departures(actions.state_leave):
            arena.send_out(block, host_bytes)
        for block, host_bytes in schedule.departures(actions.state_gone):
            arena.see_out(block, host_bytes)
        arena.keep_to(schedule.state_limits_bytes[site])
        for block in schedule.blocks(actions.state_back):
            arena.fetch(block)
        if schedule.ends_call(site):
            arena.user_may_run()

    def _key(self, kind: SiteKind, number: int, *, update: bool) -> SiteKey:
        graph, call, backward = self._engine.graph
        if update:
            graph, backward = UPDATE_GRAPH, True
        return (kind, graph, call, backward, -1 - number)

    def _note(self, block: Block) -> None:
        """Next steps under this plan find the tensor there."""
        recorder, schedule = self._engine.recorder, self._engine.schedule
        if schedule is not None and recorder is not None:
            schedule.state_blocks[recorder.state.number_of(block)] = block


def _changes(block: Block, update: bool) -> bool:
    """True if a use that changes something changes this: an update reads gradients."""
    return not update or block.key[0] is not TensorKind.GRADIENT


def _nothing(_: int) -> None:
    pass
