"""One bucket of an update on the host: parameters' twins in host memory, for the optimizer's step.

    slot   [value | gradient | value | gradient ...]      reused, bucket after bucket

A gradient that has come in the backward stays where it is (`early_gradients`).

A twin has the type, shape and strides of its parameter, so copies are of bytes, and the optimizer's
kernels go through the elements in the same order.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from teraplan.runtime.host_lane import HostLane, Wait
from teraplan.runtime.state.updates.bits import digest_of

ALIGNMENT = 64
"""Bytes at which values and gradients begin in a slot."""


class Sent(NamedTuple):
    """A gradient that is on its way to the host."""

    memory: torch.Tensor
    """(nbytes,), uint8."""
    wait: Wait


class Twin:
    """A parameter's value and gradient in host memory."""

    def __init__(
        self,
        parameter: torch.Tensor,
        value: torch.Tensor,
        gradient: torch.Tensor,
        arrives: Wait | None = None,
    ) -> None:
        assert parameter.grad is not None
        self.parameter, self.gradient = parameter, parameter.grad
        # `.data`: with a counter of its own, which tells whether the step writes to it.
        self.value, self._host_gradient = value.data, gradient.data
        self.tensor: torch.Tensor = self.value
        if isinstance(parameter, torch.nn.Parameter):
            self.tensor = torch.nn.Parameter(self.value, requires_grad=parameter.requires_grad)
        elif parameter.requires_grad:
            self.tensor = self.value.requires_grad_()
        self._version = -1
        self._digest: int | None = None
        self._arrives = arrives
        """The gradient is on its way already."""

    def out(self, lane: HostLane) -> list[Wait]:
        """Start copying to host memory."""
        waits = [lane.out(bytes_of(self.parameter), bytes_of(self.value))]
        if self._arrives is not None:
            return [*waits, self._arrives]
        return [*waits, lane.out(bytes_of(self.gradient), bytes_of(self._host_gradient))]

    def give_gradient(self, *, to_write: bool) -> None:
        """The bytes are there: the optimizer may see them, and write to them through `.data`."""
        # `.data`: if the step gives it other memory, ours is still known.
        self.tensor.grad = given = self._host_gradient.data
        self._version = given._version
        self._digest = digest_of(self._host_gradient) if to_write else None

    def back(self, lane: HostLane, *, unscaled: bool) -> None:
        """Start copying the updated value, and the gradient if the step has written to it.

        Its counter says so, but not where a fused kernel has `unscaled` it, or of `.data`.
        """
        _settle(self.value, self.tensor.detach())
        lane.back(bytes_of(self.value), bytes_of(self.parameter))
        gradient = self.tensor.grad
        if gradient is None:
            return
        written = unscaled or gradient._version != self._version
        if self._digest is not None and not written:
            written = self._digest != digest_of(self._host_gradient)
        if _settle(self._host_gradient, gradient) or written:
            lane.back(bytes_of(self._host_gradient), bytes_of(self.gradient))

    def end(self) -> None:
        """In the training thread: a gradient that the step has dropped is dropped."""
        if self.tensor.grad is None:
            self.parameter.grad = None


def _settle(memory: torch.Tensor, found: torch.Tensor) -> bool:
    """Copy to `memory` what the step has put in its place; False if it still is what is used."""
    if found.data_ptr() == memory.data_ptr() and found.stride() == memory.stride():
        return False
    memory.copy_(found)
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, (nbytes,), uint8."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def twins_in(
    slot: torch.Tensor, parameters: Sequence[torch.Tensor], sent: Mapping[int, Sent]
) -> list[Twin]:
    """Twins of parameters with gradients, in the memory of `slot`, (nbytes,), uint8.

    Gradients that have been `sent`, by identity of the parameter, are where they come to.
    """
    made, offset = [], 0
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "a parameter without a gradient is not updated"
        value = _placed(slot, offset, parameter)
        offset += _aligned(parameter.nbytes)
        early = sent.get(id(parameter))
        if early is not None:
            made.append(Twin(parameter, value, _placed(early.memory, 0, gradient), early.wait))
            continue
        made.append(Twin(parameter, value, _placed(slot, offset, gradient)))
        offset += _aligned(gradient.nbytes)
    return made


def _placed(slot: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    flat = slot.narrow(0, offset, like.nbytes).view(like.dtype)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
