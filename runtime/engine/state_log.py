"""Which tensors of the training state one step uses, and at which of its sites.

    site       4 settle      9 need   12 done
    gradient   [] -------- idle [=====]            windows (4, 5), (9, 12)

A tensor is told by the order of its first use in the step, which is the same in every step like
it, also in another process; where its memory is, a `Block` knows.
"""

from collections import Counter
from dataclasses import dataclass, field

from teraplan.runtime.state.memory.block import Block
from teraplan.values.step_trace import Tensor, TensorKind

Use = tuple[int, int, bool]
"""Site at which a tensor's use begins, that at which it ends, and whether it changes in it."""
_OPEN = -1


@dataclass(slots=True)
class _Entry:
    block: Block
    name: str
    born: bool
    """Made in this step."""
    uses: list[Use] = field(default_factory=list[Use])
    depth: int = 0
    """Uses that have begun and not ended."""


class StateLog:
    """The uses in one step. Uses that overlap count as one.

    An interrupt between any two lines leaves it such that the next use can be noted.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._numbers: dict[Block, int] = {}
        self._names: Counter[str] = Counter()
        self._parameter = ""
        """Name of the parameter that was used last: in a bucket its states follow."""

    @property
    def blocks(self) -> list[Block]:
        """Of all tensors, by their numbers."""
        return [entry.block for entry in self._entries]

    @property
    def next_number(self) -> int:
        """That of the next tensor which is used for the first time."""
        return len(self._entries)

    def number_of(self, block: Block) -> int:
        """The number of a tensor, also if it is about to be used for the first time."""
        return self._numbers.get(block, self.next_number)

    def name_of(self, block: Block) -> str | None:
        """What a trace calls it; None if the step has not used it."""
        number = self._numbers.get(block)
        return None if number is None else self._entries[number].name

    def begin(self, block: Block, site: int, *, changes: bool) -> None:
        """A use begins."""
        if block not in self._numbers:
            self._add(block, born=False)
        entry = self._entries[self._numbers[block]]
        if block.key[0] is TensorKind.PARAMETER:
            self._parameter = entry.name
        if not entry.uses or entry.uses[-1][1] != _OPEN:
            entry.uses.append((site, _OPEN, changes))
        elif changes:
            start, end, _ = entry.uses[-1]
            entry.uses[-1] = start, end, True
        entry.depth += 1

    def end(self, block: Block, site: int) -> None:
        """A use ends; one that has begun in the step before is none of this one's."""
        number = self._numbers.get(block)
        if number is None or not self._entries[number].depth:
            return
        entry = self._entries[number]
        entry.depth -= 1
        if not entry.depth:
            start, _, changes = entry.uses[-1]
            entry.uses[-1] = start, site, changes

    def born(self, block: Block, site: int) -> None:
        """A tensor is made at a site, where it takes memory whatever becomes of it."""
        self._add(block, born=True).uses.append((site, site + 1, True))

    def signature(self) -> tuple[object, ...]:
        """What is equal in steps that use the training state in the same way."""
        return tuple((e.name, e.block.nbytes, e.born, tuple(e.uses)) for e in self._entries)

    def tensors(self, num_sites: int) -> tuple[Tensor, ...]:
        """All that was used, as a trace has it."""
        return tuple(_tensor(entry, num_sites) for entry in self._entries)

    def _add(self, block: Block, *, born: bool) -> _Entry:
        what, kind = block.what, block.key[0]
        if kind is TensorKind.OPTIMIZER_STATE and self._parameter:
            what = f"{what} of {self._parameter}"
        last = self._entries[-1] if self._entries else None
        if last is None or last.block is not block or block in self._numbers:
            count = self._names[what]
            self._names[what] += 1
            numbered = kind is not TensorKind.OPTIMIZER_STATE or count
            name = f"{what} {count}" if numbered else what
            self._entries.append(_Entry(block, name, born))
        self._numbers[block] = len(self._entries) - 1
        return self._entries[-1]


def _tensor(entry: _Entry, num_sites: int) -> Tensor:
    uses = [(start, num_sites if end == _OPEN else end, c) for start, end, c in entry.uses]
    if entry.born and len(uses) == 1:  # it is the user's, and there until the step ends
        uses.append((num_sites, num_sites, False))
    kind = entry.block.key[0]
    lasts = kind is TensorKind.GRADIENT and not entry.born
    return Tensor(
        name=entry.name,
        kind=kind,
        nbytes=entry.block.nbytes,
        shape=entry.block.shape,
        dtype=entry.block.dtype,
        layer="",
        windows=tuple((start, end) for start, end, _ in uses),
        persistent=not entry.born,
        # A gradient that outlives the step is set to zero between two steps.
        changed_in=None if lasts else tuple(n for n, use in enumerate(uses) if use[2]),
    )
