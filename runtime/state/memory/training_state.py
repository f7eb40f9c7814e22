"""The parameters, gradients and optimizer state of a session's models, moved under a limit.

Compiled graphs call `acquire` before the first and `release` after the last use of a parameter, and
`settle` where a gradient is complete; the optimizer's buckets call `using`. What is not asked for
stays right all the same: its address shows where it lies.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.runtime.device import SparePages
from teraplan.runtime.state.memory.arena import StateArena
from teraplan.runtime.state.memory.at_gradients import AtGradients
from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.state.memory.block_memory import BlockMemory
from teraplan.runtime.state.memory.chunks import Chunks, Sort
from teraplan.runtime.state.memory.departures import departures
from teraplan.runtime.state.memory.gradient_hooks import watch_gradient
from teraplan.runtime.state.memory.lease import span_nbytes
from teraplan.runtime.state.memory.movable import is_last_view, is_shared
from teraplan.runtime.state.memory.move_log import Traffic
from teraplan.runtime.state.memory.read_files import ReadFiles
from teraplan.runtime.state.memory.sites import Sites
from teraplan.values.graph_table import MIN_SLOT_BYTES
from teraplan.values.step_trace import TensorKind


class TrainingState:
    """See the module's text. Its methods are called by the training thread."""

    def __init__(self, memory: BlockMemory, limit_bytes: int, *, chunk_bytes: int = 0) -> None:
        self.arena = StateArena(memory, limit_bytes)
        self._memory = memory
        memory.watch()
        self._chunks = Chunks(self.arena, chunk_bytes)
        self.chunk_bytes = chunk_bytes
        """Of blocks that small tensors share; 0: there are none."""
        self.limit_bytes = limit_bytes
        """The most memory that it takes while no plan says anything else."""
        self.read_files = ReadFiles()
        self.sites: Sites | None = None
        self.in_step = False
        """The graph that runs, or has run last, is one whose steps have sites."""
        self.make_room: Callable[[int], object] | None = None
        """Gives back memory that nobody uses, where a plan divides the budget."""
        self.spare_pages: SparePages | None = None
        """Where memory goes then that is not needed, and comes from."""
        self.at_gradients: AtGradients | None = None
        """Set where parameters may be updated in the backward."""
        self._follows_plan = False
        self._leaves: frozenset[int] = frozenset()
        self._leaves_limit = -1
        self.last_step = Traffic()
        self._before = Traffic()
        self._watched = WeakIdKeyDictionary()
        """Whose gradients are looked after, with the handles of the hooks that do so."""
        self.unused = WeakIdKeyDictionary()
        """Parameters here that no graph has used yet."""
        self._strays = WeakIdKeyDictionary()
        """Parameters with other memory than they were given here: to be taken in once more."""
        self._shared = WeakIdKeyDictionary()
        """What stays since something else has its memory, too: by tensor its address and name."""
        self._expected_bytes = 0
        self._stepped = False
        self.closed = False
        _alive.add(self)

    @staticmethod
    def all_alive() -> "list[TrainingState]":
        """Every training state of this process that has not been closed."""
        return [state for state in _alive if not state.closed]

    # -- taking tensors in -----------------------------------------------------------------------

    def adopt_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Move the memory of parameters into the arena, one at a time.

        Memory that another tensor or an array has, too, stays: that other one would see no change.
        """
        self.arena.user_may_have_run()
        with torch.inference_mode(False):  # what is made there could never be trained
            for parameter in parameters:
                if self.arena.takes(parameter):
                    self._adopt_parameter(parameter)

    def _adopt_parameter(self, parameter: torch.Tensor) -> None:
        if self.arena.block_of(parameter) is None:
            if self._stays_shared(parameter, "a parameter"):
                return
            sort = TensorKind.PARAMETER, not parameter.requires_grad
            parameter.data = self._copy(parameter.data, sort, "parameter")
        if parameter.requires_grad and parameter not in self._watched:
            self._watched[parameter] = watch_gradient(self, parameter)

    def let_stay(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give parameters memory that nothing takes away, until a graph uses them."""
        with torch.inference_mode(False):
            for parameter in parameters:
                block = self.arena.block_of(parameter)
                if block is None:
                    continue
                self.arena.use(block, writes=False)
                parameter.data = parameter.data.clone()
                self.arena.done(block, leaves=True)
                self.unused.pop(parameter, None)  # type: ignore[no-untyped-call]
                for handle in self._watched.pop(parameter, ()):  # type: ignore[no-untyped-call]
                    handle.remove()

    @property
    def shared(self) -> list[tuple[torch.Tensor, str]]:
        """What stays since something else has its memory, too, and what it is."""
        return [(t, self._shared[t][1]) for t in self._shared if t.data_ptr() == self._shared[t][0]]

    def _stays_shared(self, tensor: torch.Tensor, what: str) -> bool:
        """True, and noted, if something else has the memory of a tensor that could move."""
        if not is_shared(tensor):
            return False
        self._shared[tensor] = tensor.data_ptr(), what
        return True

    def _note_stray(self, parameter: torch.Tensor) -> None:
        """A parameter was given other memory by the user, or is a new one in an old one's place."""
        stays = parameter in self._shared and self._shared[parameter][0] == parameter.data_ptr()
        if isinstance(parameter, torch.nn.Parameter) and not stays:
            self._strays[parameter] = True

    def empty_parameter(self, like: torch.Tensor) -> torch.Tensor | None:
        """An uninitialized tensor in the arena, as `like`, which may be on the meta device.

        None if such a tensor would not move.
        """
        if like.layout != torch.strided or not MIN_SLOT_BYTES <= like.nbytes == span_nbytes(like):
            return None
        self.arena.user_may_have_run()
        sort = TensorKind.PARAMETER, not like.requires_grad
        with self._place(like, sort, "parameter") as made:
            return made

    def expect(self, nbytes: int, *, temporary_bytes: int) -> None:
        """So much will be allocated outside of the arena until `end_expecting`.

        As `adopt_state` takes in the first part, its place is free again. A plan knows the second,
        which is workspace of the step.
        """
        nbytes += 0 if self._follows_plan else temporary_bytes
        self.arena.reserve(nbytes)
        self._expected_bytes += nbytes

    def end_expecting(self) -> None:
        """What was expected has been taken in, or freed."""
        self._expect_less(self._expected_bytes)

    def _expect_less(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._expected_bytes)
        self._expected_bytes -= nbytes
        self.arena.unreserve(nbytes)

    def adopt_state(self, state: dict[str, object]) -> None:
        """Move the memory of one parameter's optimizer state into the arena.

        In the same tensors, which a state_dict that was loaded has, too. What is shared stays.
        """
        for name in [name for name in state if is_last_view(state, name)]:
            value = state[name]
            assert isinstance(value, torch.Tensor)
            state[name] = value.clone()  # or its base, which nobody can reach, would stay
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or not self.arena.takes(value):
                continue
            if self.arena.block_of(value) or self._stays_shared(value, f"{name} of an optimizer"):
                continue
            value.data = self._copy(value.data, (TensorKind.OPTIMIZER_STATE, False), name)
            self._expect_less(value.nbytes)

    def _copy(self, source: torch.Tensor, sort: Sort, name: str) -> torch.Tensor:
        with self._place(source, sort, name) as made:
            made.copy_(source)
        self.read_files.copied(source)
        return made

    @contextmanager
    def _place(self, like: torch.Tensor, sort: Sort, name: str) -> Iterator[torch.Tensor]:
        """An uninitialized tensor as `like`, in memory within this."""
        block = self._chunks.with_room(like, sort) or self._chunks.make(like, sort, name)
        self.arena.use(block, writes=True)
        try:
            yield self._chunks.add(block, like)
        finally:
            self.arena.done(block, leaves=False)

    # -- steps -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """A graph begins: the first after an optimizer's step begins the next step."""
        self.arena.user_may_have_run()
        if self._strays:
            strays = list(self._strays)
            self._strays.clear()
            self.adopt_parameters(strays)
        if self._stepped:
            self._stepped = False
            self._begin_step()

    def stepped(self) -> None:
        """An optimizer has updated parameters."""
        self._stepped = True

    def _begin_step(self) -> None:
        arena = self.arena
        arena.end_uses()  # of graphs that an error has ended
        now = arena.log.traffic
        self.last_step, self._before = now - self._before, now
        changed = arena.timeline.begin_step()
        if changed or self._leaves_limit != self.limit_bytes:
            self._leaves_limit = self.limit_bytes
            self._leaves = departures(arena.timeline.past, arena.sizes, self.limit_bytes)
        self._chunks.begin_step()
        if self.at_gradients is not None:
            self.at_gradients.begin_step()

    def follow_plan(self, follows: bool, *, host_bytes: int = 0) -> None:
        """From now on a plan says what leaves and comes back, and how much memory there is; or not.

        What it says of a tensor may turn out wrong: what is used is brought, whatever it says.

        Args:
            follows: there is a plan.
            host_bytes: the most host memory that it takes.
        """
        self.arena.user_may_have_run()
        self._follows_plan = follows
        self._memory.planned_host_bytes = host_bytes
        self.arena.make_room = self.make_room if follows else None
        self._memory.held.spare = self.spare_pages if follows else None
        if not follows:
            self.arena.keep_to(self.limit_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Change what it takes while no plan says anything else."""
        self.limit_bytes = limit_bytes
        self.arena.user_may_have_run()
        if not self._follows_plan:
            self.arena.keep_to(limit_bytes)

    @property
    def step_bytes(self) -> int:
        """What a step has alive at the end of its backward, wherever it is."""
        blocks = list(self.arena.blocks)
        lasting = sum(b.nbytes for b in blocks if b.key[0] is not TensorKind.GRADIENT)
        trained = (p for p in self._watched if p.requires_grad)
        return lasting + sum(self._memory.size_of(span_nbytes(p)) for p in trained)

    # -- what compiled graphs call ---------------------------------------------------------------

    def acquire(self, parameter: torch.Tensor, *, changes: bool = False) -> None:
        """A graph is about to use the parameter, or a view of it; `changes`: to write to it."""
        if self.closed:
            return
        block = self.arena.block_of(parameter)
        if block is None:
            self._note_stray(parameter)
            return
        if self.unused:
            self.unused.pop(parameter, None)  # type: ignore[no-untyped-call]
        if self.at_gradients is not None:
            self.at_gradients.used(parameter, block, in_step=self.in_step)
        self.begin_use([block], changes=changes)

    def release(self, parameter: torch.Tensor) -> None:
        """The graph has used it for the last time."""
        block = None if self.closed else self.arena.block_of(parameter)
        if block is not None:
            self.end_use([block])

    def settle(self, gradient: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of the gradient that may leave memory at once.

        Args:
            gradient: complete as far as one graph is concerned.
            parameter: whose gradient it is, where the graph has no more use for that; if it is
                updated now, what comes back only stands for the gradient.
        """
        if self.closed:
            return gradient
        if parameter is not None and self.at_gradients is not None:
            taken = self.at_gradients.settle(parameter, gradient)
            if taken is not None:
                return taken
        chunk = self._chunks.with_room(gradient, _GRADIENTS)
        if chunk is None:
            return self._make_gradient(gradient)
        self.begin_use([chunk], changes=True)
        try:
            return self._chunks.add(chunk, gradient).copy_(gradient)
        finally:
            self.end_use([chunk])

    def _make_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A copy in a new block."""
        made: list[torch.Tensor] = []

        def make() -> Block:
            block = self._chunks.make(gradient, _GRADIENTS, "gradient")
            made.append(self._chunks.add(block, gradient).copy_(gradient))
            self.arena.use(block, writes=True)
            self._done([block])
            return block

        if self.sites is not None and self.in_step:
            self.sites.make(make)
        else:
            make()
        return made[0]

    # -- what the optimizer's buckets call -------------------------------------------------------

    @contextmanager
    def using(self, tensors: Iterable[torch.Tensor], *, writes: bool) -> Iterator[None]:
        """Within this the tensors are in memory."""
        self._chunks.end_gradients()
        found = [self.arena.block_of(tensor) for tensor in tensors]
        blocks = [block for block in found if block is not None]
        self.begin_use(blocks, changes=writes, update=True)
        try:
            yield
        finally:
            self.end_use(blocks, update=True)

    def begin_use(
        self, blocks: Sequence[Block], *, changes: bool = False, update: bool = False
    ) -> None:
        """Bring blocks into memory, to stay until `end_use`; `update`: for an optimizer."""
        bring = partial(self._bring, blocks, changes=changes, update=update)
        if self.sites is not None and blocks and (self.in_step or update):
            self.sites.use(blocks, bring, changes=changes, update=update)
        else:
            bring()

    def _bring(self, blocks: Sequence[Block], *, changes: bool, update: bool) -> None:
        if len(blocks) > 1:
            self.arena.bring_all(blocks)
        used: list[Block] = []
        try:
            for block in blocks:
                writes = changes and update and block.key[0] is not TensorKind.GRADIENT
                self.arena.use(block, writes=writes, may_write=changes)
                used.append(block)
        except BaseException:
            for block in used:
                self.arena.done(block, leaves=False)
            raise
        if not self._follows_plan:
            self.arena.prefetch()

    def end_use(self, blocks: Sequence[Block], *, update: bool = False) -> None:
        """The use that `begin_use` began is over."""
        done = partial(self._done, blocks, update=update)
        if self.sites is not None and blocks and (self.in_step or update):
            self.sites.end_use(blocks, done, update=update)
        else:
            done()

    def _done(self, blocks: Sequence[Block], *, update: bool = False) -> None:
        for block in blocks:
            leaves = not self._follows_plan and block.position in self._leaves
            if block.key[0] is TensorKind.GRADIENT:
                block.num_spent = block.num_spent + 1 if update else 0
                over = block.spent if update else not self._follows_plan
                if block.position is not None and over:
                    # After its last use it stays the user's: it goes where that writes nothing.
                    leaves = leaves or block.record is not None
            self.arena.done(block, leaves=leaves)

    def tidy(self) -> None:
        """Forget what has ended, and take out of memory what user code has touched of the rest."""
        self.arena.user_may_have_run()
        self.arena.keep_to(self.arena.limit_bytes)
        self._memory.tidy()

    def close(self) -> None:
        """Nothing moves from now on; what is away stays readable, also in a closed storage."""
        self.closed = True
        self._chunks.close()
        self.arena.close()


_GRADIENTS: Sort = (TensorKind.GRADIENT, False)
_alive: "weakref.WeakSet[TrainingState]" = weakref.WeakSet()
"""A graph that saves nothing has nothing in its hands that tells whose it is."""
