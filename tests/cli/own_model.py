"""A model as a user would name it: `tests.cli.own_model:build`."""

import torch


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A module and its inputs."""
    module = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 8)
    )
    return module, (torch.randn(64, 512),)
