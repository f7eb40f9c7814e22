"""What tensors take at once, told when each is made; when one is gone it sees by itself."""

import weakref
from collections import Counter
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Account:
    """Memory that some tensors share."""

    nbytes: int
    can_leave: bool = False
    """It is a saved activation that has been brought back."""
    is_kept: bool = False
    """Where all saved activations stay it is there, whether or not there are tensors here."""
    num_tensors: int = 0


class Ledger:
    """Of the tensors of one run."""

    def __init__(self) -> None:
        self.most_bytes = 0
        """At once."""
        self.most_fixed_bytes = 0
        """The same of what cannot leave."""
        self.most_kept_bytes = 0
        """The same where all saved activations stay."""
        self._bytes = self._fixed_bytes = self._kept_bytes = 0
        self._accounts: dict[int, Account] = {}
        """By storage."""
        self._num_tensors: Counter[int] = Counter()
        """Of each storage."""
        self._known: set[int] = set()
        """Tensors that are alive."""

    def account_of(self, tensor: torch.Tensor) -> Account:
        """That of a tensor which was taken in."""
        return self._accounts[_storage_of(tensor)]

    def expect(self, account: Account) -> None:
        """A saved activation that stays is there from the beginning."""
        account.is_kept = True
        self._kept_bytes += account.nbytes
        self.note(0)

    def take(self, tensor: torch.Tensor, account: Account | None = None) -> None:
        """Count a tensor, unless it is known; of a view, nothing is counted.

        Args:
            tensor: without memory of its own.
            account: of what has memory with it; None: of its storage.
        """
        if id(tensor) in self._known:
            return
        storage = _storage_of(tensor)
        if storage not in self._accounts:
            self._accounts[storage] = account or Account(tensor.untyped_storage().nbytes())
        account = self._accounts[storage]
        if not account.num_tensors:
            self._add(account, account.nbytes)
        account.num_tensors += 1
        self._num_tensors[storage] += 1
        self._known.add(id(tensor))
        weakref.finalize(tensor, self._gone, id(tensor), storage).atexit = False
        self.note(0)

    def note(self, nbytes: int) -> None:
        """So much more is needed now, and for this moment alone."""
        self.most_bytes = max(self.most_bytes, self._bytes + nbytes)
        self.most_fixed_bytes = max(self.most_fixed_bytes, self._fixed_bytes + nbytes)
        self.most_kept_bytes = max(self.most_kept_bytes, self._kept_bytes + nbytes)

    def _gone(self, tensor: int, storage: int) -> None:
        self._known.remove(tensor)
        account = self._accounts[storage]
        account.num_tensors -= 1
        if not account.num_tensors:
            self._add(account, -account.nbytes)
        self._num_tensors[storage] -= 1
        if not self._num_tensors[storage]:
            del self._num_tensors[storage], self._accounts[storage]

    def _add(self, account: Account, nbytes: int) -> None:
        self._bytes += nbytes
        if not account.can_leave:
            self._fixed_bytes += nbytes
        if not account.is_kept:
            self._kept_bytes += nbytes


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
