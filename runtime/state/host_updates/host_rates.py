"""How fast an optimizer's update is on the device and on the host's cores, tried on copies.

One parameter's update is enough: the update is bound by memory, and every byte is used once.
"""

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from teraplan.planners.updates.update_share import UpdateRates, share_on_host
from teraplan.runtime.device import Device
from teraplan.runtime.state.updates.host_state import send_to
from teraplan.runtime.state.updates.stand_in import parameters_of, stand_in, values_to_host
from teraplan.runtime.state.updates.update_trial import plain_step
from teraplan.units import MIB, format_bandwidth

log = logging.getLogger(__name__)

Optimizer = torch.optim.Optimizer
_MOST_BYTES = 16 * MIB
_NUM_TRIALS = 3
"""The first has page faults and launches that later ones have not: the fastest counts."""


def work_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """What an update reads and writes: the gradient once, the parameter and its state twice."""
    values = optimizer.state.get(parameter, {}).values()
    states = sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
    return parameter.nbytes + 2 * (parameter.nbytes + states)


def faster_share(
    optimizer: Optimizer,
    tried: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    device: Device,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> float:
    """Of the updates of `parameters`, the part that is faster on the host, 0 to 1.

    Measured by updates of copies of `tried`, one of them that has a gradient and state.
    """
    link = device.hardware().host_link
    if link is None:
        return 0.0
    rates = measure(optimizer, tried, device, args, kwargs)
    nbytes = sum(p.nbytes for p in parameters)
    share = share_on_host(
        work_bytes=nbytes * work_bytes(optimizer, tried) // tried.nbytes,
        gradient_bytes=nbytes,
        parameter_bytes=nbytes,
        rates=rates,
        link=link,
    )
    log.info(
        "updates: device %s, host %s, link %s: %.0f %% are faster on the host",
        format_bandwidth(round(rates.device_bytes_per_s)),
        format_bandwidth(round(rates.host_bytes_per_s)),
        format_bandwidth(link.out_while_back_bytes_per_s),
        100 * share,
    )
    return share


def measure(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    device: Device,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> UpdateRates:
    """Rates of both places, by updates of copies of `parameter`, which has a gradient and state."""
    nbytes = work_bytes(optimizer, parameter)
    on_device = _copied(optimizer, parameter, parameter.device)
    on_host = _copied(optimizer, parameter, torch.device("cpu"))
    device_ns, host_ns = [], []
    for _ in range(_NUM_TRIALS):
        start = device.mark()
        plain_step(on_device)(on_device, *args, **kwargs)
        device_ns.append(device.elapsed_ns(start, device.mark()))
        start_ns = time.perf_counter_ns()
        plain_step(on_host)(on_host, *args, **kwargs)
        host_ns.append(time.perf_counter_ns() - start_ns)
    return UpdateRates(
        device_bytes_per_s=nbytes * 1e9 / max(1, min(device_ns)),
        host_bytes_per_s=nbytes * 1e9 / max(1, min(host_ns)),
    )


def to_try(optimizer: Optimizer) -> torch.Tensor | None:
    """A large parameter with gradient and state, but not so large that copies cost much memory."""
    found = [p for p in parameters_of(optimizer) if p.grad is not None and optimizer.state.get(p)]
    small = [p for p in found if p.nbytes <= _MOST_BYTES]
    return max(small, key=lambda p: p.nbytes, default=min(found, key=_nbytes, default=None))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def _copied(optimizer: Optimizer, parameter: torch.Tensor, place: torch.device) -> Optimizer:
    """A stand-in with a copy of one parameter, its gradient and state at `place`."""
    assert parameter.grad is not None
    made = stand_in(optimizer, {id(parameter)})
    (group,) = [group for group in made.param_groups if group["params"]]
    twin = torch.nn.Parameter(parameter.detach().to(place, copy=True))
    twin.grad = parameter.grad.detach().to(place, copy=True)
    made.state.pop(parameter, None)
    made.state[twin] = {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for name, value in optimizer.state[parameter].items()
    }
    group["params"] = [twin]
    if place.type == "cpu":
        values_to_host(made)
    send_to(made.state[twin], twin, group)
    return made
