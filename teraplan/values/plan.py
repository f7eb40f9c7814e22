"""A plan: which tensor leaves the device when, where it goes, and when it comes back.

One migration, seen over the intervals of the step (see `step_trace`):

    leave            gone              back              needed
      | resident       |  elsewhere      | resident        |  window ...
      | going out      |                 | coming in       |

The copy out starts at site `leave`. At site `gone` the runtime waits until it has finished; from
that interval on the bytes are free. At site `back` the bytes are taken again and the copy in
starts. At site `needed` the runtime waits until it has finished. So the memory that a plan uses
follows from the plan alone, however fast the links turn out to be; only waiting time does not.
Sites number_of_sites and beyond lie in the following step. A tensor that is computed again needs no
link: it is dropped when it has been saved, and made where it is needed (see `recomputed_step`).

A migration to storage may have its first bytes in host memory instead, so that both links carry one
tensor at the same time:

    tensor    [==== host_bytes ====|============ the rest ============]
                  host memory                   storage

Both parts start at `leave` and at `back`; `gone` and `needed` wait for the later one.
"""

from dataclasses import dataclass, field

from teraplan.values.hardware import Budgets, Hardware, Link, Tier
from teraplan.values.recomputed_step import recomputed_step
from teraplan.values.step_trace import StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One inactive period of one tensor, spent in another tier."""

    tensor_id: int
    leave: int
    gone: int
    back: int
    needed: int
    tier: Tier
    host_bytes: int = 0
    """Where `tier` is storage: so many of the tensor's first bytes go to host memory at the same
    time, and only the rest to storage."""
    clean: bool = False
    """The tiers already hold these bytes: nothing is written. Where an earlier migration of the
    step before wrote them, the first step under a plan has to write them after all."""
    reason: str = ""
    """Why the planner chose it, for people."""

    def parts(self, nbytes: int) -> tuple[tuple[Tier, int], ...]:
        """Tier and bytes of each part of a tensor of `nbytes`, from its first byte on."""
        if not self.host_bytes:
            return ((self.tier, nbytes),)
        return ((Tier.HOST, self.host_bytes), (self.tier, nbytes - self.host_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """One update of the step that the host's cores do, with its state in host memory for ever.

        flush            gone                  back              needed
          | gradients      |                     | parameters      |  first use in the next step
          | going out      |   host computes ... | coming in       |

    At site `flush` its gradients start to the host, at `gone` the runtime waits for that, and their
    bytes are free. The host begins when they are there and the step is at `Update.ready`. The
    parameters take no bytes of the device from their last use on until `back`; the copy in starts
    there or when the host is done. At `needed` the runtime waits for it.
    """

    update: int
    """Index into `StepTrace.updates`."""
    flush: int
    gone: int
    back: int
    needed: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """One saved activation that is dropped at once, and computed again where it is needed."""

    tensor_id: int
    reason: str = ""
    """Why the planner chose it, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan."""

    step_ns: int
    ideal_ns: int
    """The step with nothing moved or computed again, and unlimited memory."""
    device_peak_bytes: int
    """State, workspace and resident tensors together."""
    unlimited_peak_bytes: int
    """The same with nothing moved."""
    managed_peak_bytes: int
    """Of that, the most that listed tensors take at once."""
    host_peak_bytes: int
    storage_peak_bytes: int
    out_bytes: dict[Tier, int] = field(default_factory=dict[Tier, int])
    back_bytes: dict[Tier, int] = field(default_factory=dict[Tier, int])
    stall_ns: dict[int, int] = field(default_factory=dict[int, int])
    """Waiting time by tensor id; only tensors that wait."""
    bound_ns: int = 0
    """No valid plan for these budgets that computes the same tensors again has a shorter step; 0 if
    nobody asked."""

    @property
    def moved_bytes(self) -> int:
        """Over all links, out and back."""
        return sum(self.out_bytes.values()) + sum(self.back_bytes.values())

    @property
    def gap(self) -> float | None:
        """By how much the step is longer than the bound, as a fraction; None without a bound."""
        return self.step_ns / self.bound_ns - 1 if self.bound_ns else None


UNKNOWN = Prediction(
    step_ns=0,
    ideal_ns=0,
    device_peak_bytes=0,
    unlimited_peak_bytes=0,
    managed_peak_bytes=0,
    host_peak_bytes=0,
    storage_peak_bytes=0,
)
"""Of a plan that nobody has simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan for one step, together with the trace and the machine that it was made for."""

    policy: str
    budgets: Budgets
    hardware: Hardware
    trace: StepTrace
    migrations: tuple[Migration, ...]
    """Of the tensors of `step`."""
    prediction: Prediction
    host_updates: tuple[HostUpdate, ...] = ()
    """All other updates run on the device."""
    recomputed: tuple[Recomputation, ...] = ()
    storage_pace: Link | None = None
    """Storage is driven no faster, so that it takes no more of a port that others share than it did
    where the plan was made. Its latency counts nothing; None is as fast as it can."""

    @property
    def machine(self) -> Hardware:
        """The hardware as the plan drives it."""
        return self.hardware.paced(self.storage_pace)

    @property
    def step(self) -> StepTrace:
        """What is run: the trace with the recomputed tensors dropped and made again."""
        return recomputed_step(self.trace, [choice.tensor_id for choice in self.recomputed])

    @property
    def choices(
        self,
    ) -> tuple[tuple[Migration, ...], tuple[HostUpdate, ...], tuple[Recomputation, ...]]:
        """All that was decided."""
        return self.migrations, self.host_updates, self.recomputed
