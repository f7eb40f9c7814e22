"""Tells whether code has drawn random numbers, on the host or on a device."""

from typing import Any

import torch


def random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """State of the generators that code with tensors on `device` draws from by default."""
    of_host = torch.get_rng_state()
    if device.type == "cpu":
        return (of_host,)
    module: Any = torch.get_device_module(device)
    return of_host, module.get_rng_state(device)


def has_drawn(since: tuple[torch.Tensor, ...], device: torch.device) -> bool:
    """True if random numbers have been drawn since `random_state` gave `since`."""
    return not all(map(torch.equal, since, random_state(device)))
