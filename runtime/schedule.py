"""A plan turned into what to do at each site."""

from collections.abc import Mapping
from dataclasses import dataclass

from teraplan.plan import Migration, Plan
from teraplan.runtime.recorder import SiteKey
from teraplan.step_trace import Site


@dataclass(frozen=True, slots=True)
class Actions:
    """What a plan asks for when a site is reached, in this order."""

    leave: tuple[Migration, ...] = ()
    """Migrations to start."""
    gone: tuple[int, ...] = ()
    """Tensors whose bytes must have left."""
    back: tuple[int, ...] = ()
    """Tensors to start bringing back."""


_NOTHING = Actions()


class Schedule:
    """The actions of a plan by site, and the limit that they keep to."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = plan.step
        """What is run under the plan."""
        self.sites: tuple[Site, ...] = self.step.sites
        self._keys = tuple((s.kind, s.graph, s.call, s.backward, s.tensor_id) for s in self.sites)
        available = plan.budgets.device_bytes - plan.trace.state_bytes
        self.limits_bytes = tuple(available - site.workspace_bytes for site in self.sites)
        self._actions = _by_site(plan.migrations)
        self.recomputed = frozenset(choice.tensor_id for choice in plan.recomputed)
        """Tensors that are dropped when they are saved."""

    def expects(self, site: int, key: SiteKey) -> bool:
        """True if `key` is what the plan has at `site`."""
        return site < len(self._keys) and self._keys[site] == key

    def actions(self, site: int) -> Actions:
        """What to do at `site`."""
        return self._actions.get(site, _NOTHING)


def _by_site(migrations: tuple[Migration, ...]) -> Mapping[int, Actions]:
    gone: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    leave: dict[int, list[Migration]] = {}
    # Where several come back at one site, the one that is needed first is asked for first.
    for migration in sorted(migrations, key=lambda m: (m.needed, m.leave)):
        gone.setdefault(migration.gone, []).append(migration.tensor_id)
        back.setdefault(migration.back, []).append(migration.tensor_id)
        leave.setdefault(migration.leave, []).append(migration)
    return {
        site: Actions(
            gone=tuple(gone.get(site, ())),
            back=tuple(back.get(site, ())),
            leave=tuple(leave.get(site, ())),
        )
        for site in gone.keys() | back.keys() | leave.keys()
    }
