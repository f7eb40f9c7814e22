"""Optimizer state that is kept in host memory, and counted there.

What `optimizer.state[p]` holds are these tensors themselves. Small ones (numbers of steps) lie in
ordinary memory and are not counted. Where the device is the host they are the same tensors as
before, with other memory: a state_dict that was loaded has them, too, and may be loaded again.
"""

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.state.memory.host_memory import host_tensor
from teraplan.runtime.state.memory.movable import is_dense, memory_of
from teraplan.runtime.state.updates.stand_in import found_in
from teraplan.values.graph_table import MIN_SLOT_BYTES

State = dict[str, Any]

SHARES_MEMORY = (
    "keeps state that shares memory with a gradient, a parameter or other state, or tensors in "
    "containers"
)
_on_host = WeakIdKeyDictionary()
"""Parameters that are updated on the host, of all sessions."""


def note(parameter: torch.Tensor) -> None:
    """The parameter is updated on the host from now on."""
    _on_host[parameter] = True


def forget(parameter: torch.Tensor) -> None:
    """The parameter is updated on its device again."""
    if parameter in _on_host:
        del _on_host[parameter]


def is_updated_on_host(parameter: torch.Tensor) -> bool:
    """True if the parameter's optimizer state belongs in host memory."""
    return parameter in _on_host


def shares_memory(state: State, parameter: torch.Tensor) -> bool:
    """True if a parameter's state is not tensors each with memory of its own.

    Copied one by one, two names of one tensor would be two tensors, and what is the parameter's or
    the gradient's own would no longer change with it. In containers nobody looks for them.
    """
    memories = {memory_of(parameter)}
    if parameter.grad is not None:
        memories.add(memory_of(parameter.grad))
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            if next(found_in(value, torch.Tensor), None) is not None:
                return True
        elif memory_of(value) in memories:
            return True
        else:
            memories.add(memory_of(value))
    return False


class HostState:
    """The state tensors that lie in one pool of host memory."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._held = WeakIdKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in list(self._held))

    def take_in(self, state: State) -> bool:
        """Let a parameter's state be in host memory; False if there is not enough of it.

        Then some of it may be there already: `send_to` the device.
        """
        for name, value in list(state.items()):
            if not isinstance(value, torch.Tensor) or value in self._held:
                continue
            if value.nbytes < MIN_SLOT_BYTES or not is_dense(value):
                state[name] = value.cpu()
                continue
            taken = host_tensor(self.pool, value)
            if taken is None:
                return False
            taken.copy_(value)
            if value.is_cpu:
                value.data = taken
            else:
                state[name] = taken
            self._held[state[name]] = True
        return True

    def release(self, state: State) -> None:
        """Let a parameter's state be in ordinary memory of the host."""
        for value in list(state.values()):
            if isinstance(value, torch.Tensor) and value in self._held:
                value.data = value.data.clone()
                del self._held[value]


def send_to(state: State, parameter: torch.Tensor, group: dict[str, Any]) -> None:
    """Let a parameter's state be where the parameter is, as the optimizer itself would have it."""
    on_device = parameter.is_cpu or bool(group.get("fused") or group.get("capturable"))
    for name, value in list(state.items()):
        if not isinstance(value, torch.Tensor) or value.device == parameter.device:
            continue
        if value.ndim or (name == "step" and on_device):
            state[name] = value.to(parameter.device)
