"""Decides whether a session's training state moves, and how much memory it may take.

Until there is a plan for the whole step, the state has a fixed part of the device budget.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.config import Config
from teraplan.errors import PlanMismatchError
from teraplan.runtime.device import Device
from teraplan.runtime.process import census, fallbacks
from teraplan.runtime.process.names import all_described
from teraplan.runtime.state.memory.chunks import chunk_nbytes
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.runtime.state.not_used_yet import NotUsedYet
from teraplan.runtime.state.updates.gradient_updates import GradientUpdates
from teraplan.runtime.state.updates.optimizer_steps import OptimizerSteps
from teraplan.runtime.state.updates.stand_in import parameters_of
from teraplan.runtime.state.updates.update_needs import (
    TEMPORARIES,
    num_temporaries,
    temporary_bytes,
)
from teraplan.units import format_nbytes

log = logging.getLogger(__name__)

_FIRST_SHARE = 0.5
"""Part of the budget for the state until the graphs are known."""


class StateKeeper:
    """The moving training state of one session, if there is any."""

    def __init__(
        self,
        config: Config,
        device: Device,
        models: Callable[[], Iterable[nn.Module]],
        chunk_bytes: int | None = None,
    ) -> None:
        """A session's keeper, before its first graph.

        Args:
            config: of the session.
            device: to train on.
            models: those that are compiled to run in the session.
            chunk_bytes: as a plan that is replayed has them; None: as the machine needs them.
        """
        self._config, self._device = config, device
        self._models, self._planned_chunk_bytes = models, chunk_bytes
        self._decided = False
        self.state: TrainingState | None = None
        self.refusal = ""
        """Why the training state stays although it should move."""
        self._steps: OptimizerSteps | None = None
        self._updates_in_step = ""
        """Why no parameter is updated in the backward although they are to be."""
        self._most_states: int | None = None
        """Tensors of a parameter's size that an optimizer keeps of one; None: there is none yet."""
        self._num_temporaries = TEMPORARIES
        self._largest_bytes = self._largest_trained_bytes = self._together_bytes = 0
        self._largest_sparse_bytes = 0
        """Of those whose gradients are sparse, and no tensors of their size."""
        self._used_at_once_bytes = 0
        """By a graph, of parameters."""
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] | None = None
        """Those that there were when the first graph was compiled."""
        self._met = WeakIdKeyDictionary()
        """Parameters that were met while the state stayed."""
        self._not_used: NotUsedYet | None = None

    @property
    def moves(self) -> bool:
        """True if parameters, gradients and optimizer state move."""
        return self.state is not None

    @property
    def could_move(self) -> bool:
        """True if the state stays, and would not with `training_state="moves"`."""
        return not self.moves and not self._why_it_stays

    @property
    def _why_it_stays(self) -> str:
        """Why the state stays whatever is asked for; "" if it can move."""
        config, device = self._config, self._device
        if device.why_state_stays:
            return f"on {device.type.upper()}: {device.why_state_stays}"
        if config.encrypt and device.shows_state_in_files:
            return "with encrypt: what is away is looked at in the file itself"
        if config.host_updates != "never" and device.has_host_beside:
            return "with host_updates: copies to the host's cores read them beside the computation"
        return ""

    @property
    def may_start(self) -> bool:
        """True if the state stays, and is to move as soon as the budget is seen to be too small."""
        config = self._config
        in_bytes = config.device_budget is not None and config.device_budget.nbytes is not None
        by_itself = config.training_state == "auto" and config.plan == "auto"
        return self._device.moves_state_unasked and by_itself and in_bytes and self.could_move

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What takes a slower path than it should, one sentence each."""
        if self.state is None:
            return ()
        return tuple(self._slow_paths())

    def _slow_paths(self) -> Iterator[str]:
        """What could move and does not, or slowly."""
        assert self.state is not None
        shared = list(self.state.shared)
        names = all_described(tensor for tensor, _ in shared)
        for (tensor, what), name in zip(shared, names, strict=True):
            yield _shared_text(f"{what} ({name}, {format_nbytes(tensor.nbytes)})")
        if self._not_used is not None:
            yield from self._not_used.fallbacks
        if self._steps is not None:
            yield from self._steps.fallbacks
        if self._at_gradients is not None:
            yield from self._at_gradients.fallbacks
        if self._updates_in_step:
            yield self._updates_in_step
        if self.state.arena.why_stayed:
            yield f"not all that was to leave had room elsewhere: {self.state.arena.why_stayed}"

    @property
    def shared_bytes(self) -> int:
        """What could move and stays, since something else has its memory, too."""
        return sum(tensor.nbytes for tensor, _ in self.state.shared) if self.state else 0

    @property
    def limit_bytes(self) -> int:
        """What of the device budget is the state's in steps without a plan."""
        return self.state.limit_bytes if self.state is not None else 0

    @property
    def step_bytes(self) -> int:
        """What moves, all in memory at once: more than that would be of no use."""
        return self.state.step_bytes if self.state is not None else 0

    def count_staying(self) -> int | None:
        """All of the state, with what optimizers will make, were it to stay; None if it cannot."""
        if self._config.training_state != "auto":
            return None
        to_come = (
            states * parameter.nbytes
            for optimizer in census.optimizers()
            for parameter, states in census.states_to_come(
                optimizer, unknown=census.STATES_OF_UNKNOWN
            )
        )
        return self.step_bytes + sum(to_come)

    @property
    def _at_gradients(self) -> GradientUpdates | None:
        return self._steps.at_gradients if self._steps is not None else None

    @property
    def rehearses(self) -> bool:
        """True if parameters are to be updated in the backward, and are not yet in the next one."""
        return self._at_gradients is not None and self._at_gradients.rehearses

    @property
    def update_counts(self) -> tuple[int, int] | None:
        """Parameters updated in the last backward and in the last step; None if only there."""
        return self._at_gradients.counts if self._at_gradients is not None else None

    @property
    def chunk_bytes(self) -> int:
        """Of the blocks that small tensors share; 0 if none do."""
        return self.state.chunk_bytes if self.state is not None else 0

    @property
    def update_bytes(self) -> int:
        """What an update needs beside the state: of one parameter, or of all where they stay."""
        of_all = 0 if self.moves else self._together_bytes
        return max(self._num_temporaries * self._largest_trained_bytes, of_all)

    def meet(self, inputs: Iterable[object]) -> None:
        """A graph with these inputs is about to be compiled."""
        used = _parameters(inputs)
        census.note_sparse_gradients(self._models())
        optimizers = list(_optimizers_of(used)) if self._looks_ahead else []
        if optimizers:
            self._expect_states(used, optimizers)
            self._num_temporaries = max(map(num_temporaries, optimizers))
            self._together_bytes = max(map(temporary_bytes, optimizers))
        to_come = _parameters(self._to_come(optimizers)) if self._looks_ahead else []
        self.expect(list(dict.fromkeys([*used, *to_come])))
        if self.state is not None:
            self.state.adopt_parameters(used)
            assert self._not_used is not None
            self._not_used.take_in(to_come)
            self.take_in_optimizers(optimizers)

    def _expect_states(
        self, used: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        states = max(map(census.most_states, optimizers))
        known = set(map(id, chain.from_iterable(map(parameters_of, optimizers))))
        if any(p.requires_grad and id(p) not in known for p in used):  # another may come
            states = max(states, census.STATES_OF_UNKNOWN)
        self._most_states = max(self._most_states or 0, states)

    def _to_come(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
        """Parameters that graphs to come may use here: of compiled modules, or trained by these."""
        of_modules = (module.parameters() for module in self._models())
        for parameter in chain.from_iterable((*of_modules, *map(parameters_of, optimizers))):
            if parameter.device.type in (self._device.type, "meta"):
                yield parameter

    @property
    def _looks_ahead(self) -> bool:
        """True if graphs that come later matter now."""
        return self.moves or self.may_start or not self._decided

    def check(self) -> None:
        """A graph has run.

        Raises:
            FallbackRefusedError: `strict` is set, and a parameter stays although the state moves.
        """
        if self._config.strict and self.state is not None:
            for what in self._slow_paths():
                fallbacks.allow(what, strict=True)

    def take_in_optimizers(self, met: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Let state move that was loaded before the first step, or was made in it before there were
        buckets: or it would count as what stays. `met`: optimizers that may be new."""
        if self._steps is None:
            return
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet(census.optimizers())
        self._optimizers.update(met)
        for optimizer in self._optimizers:
            if optimizer.state:
                self._steps.take_in(optimizer)

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """These, on the device or on the meta device, are to be trained."""
        if not self._decided:
            self._decided = True
            to_come = (p for p in parameters if p.is_meta)
            budget = self._budget_bytes(sum(map(census.nbytes_with_state, to_come)))
            if budget is not None:
                here = sum(p.nbytes for p in parameters if not p.is_meta)
                self._open(budget - (self._device.state_bytes() - here))
        trained = [p for p in parameters if p.requires_grad]
        sparse = [p.nbytes for p in trained if census.has_sparse_gradient(p)]
        dense = [p.nbytes for p in trained if not census.has_sparse_gradient(p)]
        self._largest_bytes = max([self._largest_bytes, *(p.nbytes for p in parameters)])
        self._largest_trained_bytes = max([self._largest_trained_bytes, *dense])
        self._largest_sparse_bytes = max([self._largest_sparse_bytes, *sparse])
        if self.may_start:
            self._met.update(dict.fromkeys(parameters))
        self._let_have_the_least()

    def uses_at_once(self, nbytes: int) -> None:
        """A graph will use so many bytes of parameters at the same time."""
        self._used_at_once_bytes = max(self._used_at_once_bytes, nbytes)
        self._let_have_the_least()

    def start(self) -> None:
        """Let the state move from here on that has stayed until now."""
        budget = self._config.device_budget
        assert self.may_start
        assert budget is not None
        assert budget.nbytes is not None
        parameters = list(self._met)
        here = sum(p.nbytes for p in parameters)
        log.info("training state of %s and more moves from here on", format_nbytes(here))
        self._open(budget.nbytes - (self._device.state_bytes() - here))
        self._met.clear()
        self.meet(parameters)

    def share_out(self, budget_bytes: int, other_bytes: int) -> None:
        """Give the state what of the budget nothing else needs.

        Args:
            budget_bytes: the device budget.
            other_bytes: what all that is not the state is to have.
        """
        if self.state is None:
            return
        self.state.set_limit(max(budget_bytes - other_bytes, self.least_bytes))

    def close(self) -> None:
        """Nothing of the state moves from now on; its tensors stay readable."""
        if self._not_used is not None:
            self._not_used.close()
        if self._steps is not None:
            self._steps.close()
        if self.state is not None:
            self.state.close()

    def _let_have_the_least(self) -> None:
        if self.state is not None:
            self.state.set_limit(max(self.state.limit_bytes, self.least_bytes))

    @property
    def least_bytes(self) -> int:
        """What moving state takes at once at least, as far as its parameters are known."""
        states = census.STATES_OF_UNKNOWN if self._most_states is None else self._most_states
        at_once = 2 + states  # an update needs the parameter and its gradient besides
        if self._config.update == "gradient":  # temporaries, while graphs have their own memory
            at_once += TEMPORARIES
        of_trained = at_once * self._largest_trained_bytes
        of_sparse = (at_once - 1) * self._largest_sparse_bytes
        return max(of_trained, of_sparse, self._largest_bytes, self._used_at_once_bytes)

    def _budget_bytes(self, meta_bytes: int) -> int | None:
        """The device budget if the state is to move under it, else None."""
        config, device = self._config, self._device
        if config.training_state == "stays" or config.device_budget is None:
            return None
        whole = device.state_bytes() + sum(census.missing_nbytes(device.type))
        whole += meta_bytes
        budget = config.device_budget.resolve(whole)
        # Where the state has room, to move activations alone is faster.
        fits = config.device_budget.nbytes is None or whole <= budget
        if config.training_state == "auto" and (fits or not device.moves_state_unasked):
            return None
        if why := self._why_it_stays:
            if config.plan != "auto":
                raise PlanMismatchError(
                    f"{config.plan}: the plan moves parameters, gradients and optimizer state, "
                    f"and they stay on the device {why}; leave that out, or plan again"
                )
            self.refusal = (
                f"parameters stay on the device {why}; so do gradients and "
                f"optimizer state, {format_nbytes(whole)} in all"
            )
            return None
        log.info("training state of %s moves", format_nbytes(whole))
        return budget

    def _open(self, left_bytes: int) -> None:
        """Start with a part of what is left of the budget."""
        limit_bytes = int(max(0, left_bytes) * _FIRST_SHARE)
        device = self._device
        memory = device.state_memory()
        at_gradients = self._config.update == "gradient" and memory.is_read_by_host
        if self._config.update == "gradient" and not at_gradients:
            self._updates_in_step = (
                'with update="gradient" parameters are updated in the step all the same: the host, '
                f"which has to see what changes them, does not read memory on {device.type.upper()}"
            )
        chunk_bytes = self._planned_chunk_bytes
        if chunk_bytes is None:
            chunk_bytes = chunk_nbytes(
                memory.link(device.hardware()), limit_bytes, transfer_ns=memory.transfer_ns
            )
        self.state = TrainingState(memory, limit_bytes, chunk_bytes=chunk_bytes)
        self.state.make_room, self.state.spare_pages = device.make_room, device.spare_pages
        device.keeps_beside(memory)
        self._not_used = NotUsedYet(self.state, lambda: self.least_bytes)  # its hook is the first
        make_room = device.make_room_for_tensors
        self._steps = OptimizerSteps(self.state, make_room, at_gradients=at_gradients)


def _optimizers_of(parameters: Iterable[torch.Tensor]) -> Iterator[torch.optim.Optimizer]:
    """Those that train one of these, or several."""
    known = set(map(id, parameters))
    for optimizer in census.optimizers():
        if not known.isdisjoint(map(id, parameters_of(optimizer))):
            yield optimizer


def _parameters(values: Iterable[object]) -> list[torch.Tensor]:
    """Those that can be trained: within a functional call a module has results in their places."""
    return [value for value in values if isinstance(value, torch.nn.Parameter)]


def _shared_text(what: str) -> str:
    return (
        f"{what} stays in memory that something else has, too: a view, an array, a state_dict or "
        "another parameter; drop it before the first step, or tie parameters by using one object "
        "twice"
    )
