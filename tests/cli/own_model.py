"""A model as a user would name it: `tests.cli.own_model:build`."""

import torch


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A module and its inputs."""
    module = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 8)
    )
    return module, (torch.randn(64, 512),)


def converted() -> tuple[torch.nn.Module, torch.Tensor]:
    """Matrices in bfloat16 behind a norm in float32, and one input that is no tuple."""
    first, rest = torch.nn.LayerNorm(4096), torch.nn.Linear(4096, 4096).to(torch.bfloat16)
    return torch.nn.Sequential(first, _To(torch.bfloat16), rest), torch.randn(8192, 4096)


def single() -> tuple[torch.nn.Module, torch.Tensor]:
    """The same in float32."""
    return torch.nn.Sequential(torch.nn.LayerNorm(4096), torch.nn.Linear(4096, 4096)), torch.randn(
        8192, 4096
    )


def double() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A dtype whose speed no machine of the library has."""
    return torch.nn.Linear(8, 8, dtype=torch.float64), (torch.randn(4, 8, dtype=torch.float64),)


def looks_at_values() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A factory that reads a tensor, and names its input."""
    width = int(torch.linspace(0, 64, 3, device="cpu").tolist()[-1])
    return torch.nn.Linear(width, 8), {"input": torch.randn(4, width)}


def data_dependent() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model that reads a tensor."""
    return _Reads(), torch.randn(4, 8)


def fails() -> None:
    """A factory with a bug."""
    raise KeyError("a bug of the factory")


def no_module() -> tuple[int, torch.Tensor]:
    """Nothing that can be trained."""
    return 3, torch.randn(8)


def no_gradient() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model whose output leads to no parameter."""
    return _Detached(), torch.randn(4, 8)


no_function = 3


class _To(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype)


class _Reads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * y.max().item()


class _Detached(_Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y.detach()
