"""What `teraplan.status()` answers."""

from dataclasses import dataclass, field

from teraplan.units import format_nbytes, format_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """One storage directory and how it is reached."""

    directory: str
    path: str
    """The I/O path taken, e.g. "posix O_DIRECT"."""
    file_system: str
    written_bytes: int
    read_bytes: int
    written_per_day_bytes: int = 0
    """At the rate since the start."""
    disks: tuple[str, ...] = ()
    """What each disk below counts about itself, in words: written in its life, wear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A session as it stands. Sizes in bytes, times in ns; -1 where nothing is known yet."""

    phase: str
    """"idle", "first step", "measuring", "planned" or "unplanned"."""
    unplanned_because: str = ""
    """What a plan for steps like the last one waits for; empty if there is one."""
    steps: int = 0
    graphs: int = 0
    sites: int = 0
    """Sites of the step that ran last."""
    coverage: float = 0.0
    """Share of saved-activation bytes that can be moved, 0 to 1."""
    uncovered: tuple[tuple[str, int, str], ...] = ()
    """The largest saved activations that cannot: (name, bytes, why)."""
    device_budget_bytes: int = -1
    state_bytes: int = -1
    held_back_bytes: int = -1
    """Of the budget, because the process took more than what its tensors explain; in the peaks
    below."""
    unlimited_peak_bytes: int = -1
    predicted_peak_bytes: int = -1
    actual_peak_bytes: int = -1
    """Measured by the device in steps under the plan in force; moving training state is in it, and
    in the two above."""
    predicted_managed_peak_bytes: int = -1
    managed_peak_bytes: int = -1
    """Counted by the engine in the last step."""
    ideal_step_ns: int = -1
    predicted_step_ns: int = -1
    """Waits for moving training state are those that steps like it have had."""
    actual_step_ns: int = -1
    """Median of the last planned steps."""
    plans: int = 0
    """That steps like the last one have been run under so far, the present one included."""
    slowdown: float = 1.0
    """Of the computation in planned steps, against the steps that were measured."""
    link_speed: float = 1.0
    """Of links in planned steps, against links measured alone."""
    stall_ns: int = -1
    """Waits for transfers in the last planned step."""
    stalls: tuple[tuple[str, int], ...] = ()
    """Waits of that step by tensor, longest first."""
    bytes_out: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes that left the device in the last step, by tier."""
    bytes_back: dict[str, int] = field(default_factory=dict[str, int])
    recomputed: int = 0
    """Saved activations that the plan computes again."""
    recomputed_bytes: int = -1
    """Of them, in the last step."""
    recomputed_ns: int = -1
    """That took so long."""
    moving_state_bytes: int = -1
    """Parameters, gradients and optimizer state that move, wherever they are; -1: none moves."""
    moving_state_budget_bytes: int = -1
    """The most of the device budget that they take: by the plan, before there is one at all."""
    state_written_bytes: int = -1
    """To storage in the last step; unchanged parameters cause no writes."""
    state_read_bytes: int = -1
    state_to_host_bytes: int = -1
    """To host memory in that step."""
    state_from_host_bytes: int = -1
    state_wait_ns: int = -1
    """Waits for them in the last step."""
    updates_in_backward: int = -1
    """Parameters that were updated at their gradients before the last step of their optimizers;
    -1 unless `update` is "gradient"."""
    updates_in_step: int = -1
    """The others that were updated."""
    host_state_bytes: int = -1
    """Optimizer state in host memory, of parameters that are updated there; -1: none may be."""
    host_updates: int = 0
    """Parameters that the host's cores have updated in the last step of an optimizer."""
    host_gradients_sent_early: int = 0
    """Of these, the ones whose gradients went to the host in the backward."""
    host_update_ns: int = -1
    """That took so long, copies not counted."""
    host_wait_ns: int = -1
    """From the end of the device's part of that step to the end of the host's."""
    diverged_steps: int = 0
    """Steps that did something else than was planned, and went on without a plan."""
    stores: tuple[StoreStatus, ...] = ()
    endurance_used: float = -1.0
    """Share of the option `endurance` that this run has written; -1 without it."""
    fallbacks: tuple[str, ...] = ()
    plan_path: str = ""
    trace_path: str = ""
    run_path: str = ""

    def __str__(self) -> str:
        lines = [
            f"teraplan: {self.phase}, {self.steps} steps, {self.graphs} graphs, {self.sites} sites",
            f"  saved activations covered  {self.coverage:.1%}",
            f"  device budget              {_bytes(self.device_budget_bytes)}",
            f"  peak unlimited             {_bytes(self.unlimited_peak_bytes)}{self._free}",
            f"  peak predicted / actual    {_bytes(self.predicted_peak_bytes)}"
            f" / {_bytes(self.actual_peak_bytes)}",
            f"  step ideal                 {_time(self.ideal_step_ns)}",
            f"  step predicted / actual    {_time(self.predicted_step_ns)}"
            f" / {_time(self.actual_step_ns)}",
        ]
        if self.unplanned_because:
            lines.append(f"  no plan yet                {self.unplanned_because}")
        if self.held_back_bytes > 0:
            lines.append(f"  held back of the budget    {_bytes(self.held_back_bytes)}")
        if self.plans > 1:
            lines.append(
                f"  plan number {self.plans:<15}computation takes {self.slowdown:.2f} of what was "
                f"measured, links have {self.link_speed:.2f} of their speed"
            )
        if self.diverged_steps:
            lines.append(f"  steps off their plan       {self.diverged_steps} of {self.steps}")
        lines.append(f"  waits in the last step     {_time(self.stall_ns)}")
        lines += [f"    {name}: {_time(ns)}" for name, ns in self.stalls[:5]]
        for tier in sorted(self.bytes_out):
            lines.append(
                f"  {tier:8} out / back        {_bytes(self.bytes_out[tier])}"
                f" / {_bytes(self.bytes_back.get(tier, 0))} per step"
            )
        if self.recomputed:
            lines.append(
                f"  computed again             {self.recomputed} activations, "
                f"{_bytes(self.recomputed_bytes)} in {_time(self.recomputed_ns)}"
            )
        lines += self._of_training_state()
        for s in self.stores:
            lines.append(f"  store {s.directory}: {s.path} on {s.file_system}")
            lines.append(
                f"    written {_bytes(s.written_bytes)}, {_bytes(s.written_per_day_bytes)} per day;"
                f" read {_bytes(s.read_bytes)}"
            )
            lines += [f"    {disk}" for disk in s.disks]
        if self.endurance_used >= 0:
            lines.append(f"  endurance used by this run {self.endurance_used:.4%}")
        lines += [f"  fallback: {text}" for text in self.fallbacks]
        return "\n".join(lines)

    @property
    def _free(self) -> str:
        """What the predicted peak has beside tensors, where nothing has to move for it."""
        free_bytes = self.predicted_peak_bytes - self.unlimited_peak_bytes
        if self.unlimited_peak_bytes < 0 or free_bytes <= 0:
            return ""
        return f" of tensors; the budget has room for {_bytes(free_bytes)} of free memory besides"

    def _of_training_state(self) -> list[str]:
        lines: list[str] = []
        if self.moving_state_bytes >= 0:
            lines += [
                f"  training state / in memory {_bytes(self.moving_state_bytes)}"
                f" / {_bytes(self.moving_state_budget_bytes)}",
                f"  written / read per step    {_bytes(self.state_written_bytes)}"
                f" / {_bytes(self.state_read_bytes)}, waits {_time(self.state_wait_ns)}",
            ]
            if self.state_to_host_bytes > 0 or self.state_from_host_bytes > 0:
                lines.append(
                    f"  to / from host per step    {_bytes(self.state_to_host_bytes)}"
                    f" / {_bytes(self.state_from_host_bytes)}"
                )
        if self.updates_in_backward >= 0:
            lines.append(
                f"  updates in backward / step {self.updates_in_backward} / {self.updates_in_step}"
            )
        if self.host_state_bytes >= 0:
            lines += [
                f"  optimizer state on host    {_bytes(self.host_state_bytes)}",
                f"  updates on host            {self.host_updates} in {_time(self.host_update_ns)}"
                f", {_time(self.host_wait_ns)} longer than the device's part;"
                f" {self.host_gradients_sent_early} gradients sent in the backward",
            ]
        return lines


def _bytes(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes >= 0 else "not known yet"


def _time(ns: int) -> str:
    return format_ns(ns) if ns >= 0 else "not known yet"
