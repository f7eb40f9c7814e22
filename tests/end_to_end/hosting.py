"""What tests of updates on the host's cores share: the comparison with the plain optimizer."""

from teraplan.runtime.state.host_updates.host_updates import HostUpdates
from tests.end_to_end.training import UNLIMITED, Program, Run, assert_same, run, sessions

HOST_BUDGET = 16 << 20
THREE = 0.45
"""Of the parameters' bytes: three of six weights."""


def plain(program: Program, **options: object) -> Run:
    """The program with the plain optimizer."""
    return run(program, device_budget=UNLIMITED, training_state="stays", **options)


def hosted(program: Program, *, share: object = THREE, **options: object) -> Run:
    """The program with a share of its updates on the host."""
    return plain(program, **{"host_updates": share, "host_budget": HOST_BUDGET, **options})


def check(program: Program, *, share: float = THREE, updates: int = 3, **options: object) -> Run:
    """The bits are those of the plain optimizer, and the host had as many updates in each step."""
    reference = plain(program, **options)
    found = hosted(program, share=share, **options)
    assert_same(reference, found)
    numbers = [status.host_updates for status in found.statuses]
    assert numbers == [updates] * len(numbers)
    return found


def host_updates() -> HostUpdates:
    """Those of the session that has some."""
    (found,) = all_host_updates()
    return found


def all_host_updates() -> list[HostUpdates]:
    """Those of all sessions that have some."""
    return [s.host_updates for s in sessions() if s.host_updates.wanted]
