"""Which tensors count as memory of the process."""

import torch

from teraplan.runtime import census


def test_what_a_compiler_has_traced_with_is_no_memory() -> None:
    before = census.tensor_nbytes("cpu")
    real = torch.ones(1000)
    traced = torch._to_functional_tensor(real)  # pyright: ignore[reportPrivateImportUsage]
    batched = torch.vmap(lambda row: [row])(real.reshape(10, 100))
    assert census.tensor_nbytes("cpu") == before + 4000
    assert all(storage.data_ptr() for storage in census.storages("cpu") if storage.nbytes())
    del traced, batched
    assert census.tensor_nbytes("cpu") == before + 4000
