"""Accepts or refuses a plan, sharing no code with what makes plans.

Plans come from planners, which may have bugs, and from files that people edited. So everything is
recomputed here from the trace and the migrations in plain loops: a second opinion, not a fast one.
A plan that passes never needs more memory than its budgets, whatever the speed of the links; the
simulated times are only looked at for being possible.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from teraplan.checker.check_recomputed import check_recomputed, with_recomputed
from teraplan.checker.check_updates import DeviceView, check_updates
from teraplan.checker.violations import Violation, ViolationKind
from teraplan.errors import InvalidPlanError
from teraplan.units import format_nbytes
from teraplan.values.hardware import Tier
from teraplan.values.plan import Migration, Plan
from teraplan.values.step_trace import StepTrace, Tensor, TensorKind, wrong_updates


def require_valid(plan: Plan) -> None:
    """Does nothing if the plan holds.

    Raises:
        InvalidPlanError: with the first few violations.
    """
    violations = check_plan(plan)
    if violations:
        raise invalid(broken_rules(violations) or violations)


def broken_rules(violations: Sequence[Violation]) -> tuple[Violation, ...]:
    """Those that no new prediction would mend."""
    return tuple(v for v in violations if v.kind is not ViolationKind.PREDICTION)


def invalid(violations: Sequence[Violation], policy: str | None = None) -> InvalidPlanError:
    """The error that names the first few of these, and the policy where that has a bug."""
    listed = "".join(f"\n  {v.kind}: {v.message}" for v in violations[:5])
    more = f"\n  and {len(violations) - 5} more" if len(violations) > 5 else ""
    rules = "1 rule" if len(violations) == 1 else f"{len(violations)} rules"
    broken = f"breaks {rules}:{listed}{more}\n"
    if policy is not None:
        return InvalidPlanError(
            f'the plan of policy "{policy}" {broken}correct the policy, or choose another'
        )
    return InvalidPlanError(f"the plan {broken}correct what is named here, or plan again")


def check_plan(plan: Plan) -> tuple[Violation, ...]:
    """Everything that is wrong with `plan`; empty if it can be run."""
    violations = list(_check_trace(plan.trace))
    if violations:
        return tuple(violations)
    violations += check_recomputed(plan)
    violations += check_updates(plan)
    if violations:
        return tuple(violations)
    kept, plan = plan, with_recomputed(plan)
    view = DeviceView.of(plan)
    violations += _check_migrations(plan, view)
    if violations:  # what follows would only repeat them in harder words
        return tuple(violations)
    violations += _check_clean(plan, view)
    violations += _check_memory(plan, kept, view)
    violations += _check_times(plan, kept, view)
    return tuple(violations)


def _check_trace(trace: StepTrace) -> Iterator[Violation]:
    num_sites = len(trace.sites)
    for site, entry in enumerate(trace.sites):
        if entry.tensor_id is not None and not 0 <= entry.tensor_id < len(trace.tensors):
            message = f"site {site} names tensor {entry.tensor_id} of {len(trace.tensors)}"
            yield Violation(kind=ViolationKind.TRACE, message=message, site=site)
    for tensor in trace.tensors:
        last = 0
        for start, end in tensor.windows:
            if not last <= start <= end <= num_sites:
                message = f"{tensor.name} has the window {start} to {end}; {num_sites} sites"
                yield Violation(kind=ViolationKind.TRACE, message=message)
            last = end
        if not tensor.windows or tensor.nbytes < 0:
            message = f"{tensor.name} has no window or a negative size"
            yield Violation(kind=ViolationKind.TRACE, message=message)
    for number, why in wrong_updates(trace):
        yield Violation(kind=ViolationKind.TRACE, message=f"update {number}: {why}")


def _check_migrations(plan: Plan, view: DeviceView) -> Iterator[Violation]:
    links = {Tier.HOST: plan.hardware.host_link, Tier.STORAGE: plan.hardware.storage_link}
    seen: dict[tuple[int, int], int] = {}
    for index, m in enumerate(plan.migrations):

        def wrong(kind: ViolationKind, message: str, index: int = index) -> Violation:
            return Violation(kind=kind, message=f"migration {index}: {message}", migration=index)

        if not 0 <= m.tensor_id < len(plan.trace.tensors):
            yield wrong(ViolationKind.TENSOR, f"tensor {m.tensor_id} of {len(plan.trace.tensors)}")
            continue
        tensor = view.tensors[m.tensor_id]
        for tier in (Tier.HOST, m.tier) if m.host_bytes else (m.tier,):
            if links.get(tier) is None:
                message = f"{tensor.name} moves to {tier}, which is not there"
                yield wrong(ViolationKind.TIER, message)
        if m.host_bytes and (m.tier is not Tier.STORAGE or not 0 < m.host_bytes < tensor.nbytes):
            message = (
                f"{tensor.name} of {tensor.nbytes} bytes has {m.host_bytes} in host memory and the "
                f"rest in {m.tier}; a split is between host and storage, and both have a part"
            )
            yield wrong(ViolationKind.SPLIT, message)
        if not 0 <= m.leave <= m.gone < m.back <= m.needed:
            yield wrong(
                ViolationKind.ORDER,
                f"{tensor.name} has leave {m.leave}, gone {m.gone}, back {m.back}, "
                f"needed {m.needed}; the order is leave <= gone < back <= needed",
            )
            continue
        period = _period(tensor, len(plan.trace.sites), m)
        if m.tensor_id in view.absent:
            message = f"{tensor.name} is never on the device: its update runs on the host"
            yield wrong(ViolationKind.PERIOD, message)
        elif period is None:
            yield wrong(
                ViolationKind.PERIOD,
                f"{tensor.name} is away from site {m.leave} to {m.needed}, "
                f"but is touched in {_format_windows(tensor)}",
            )
        elif (m.tensor_id, period) in seen:
            other = seen[m.tensor_id, period]
            message = f"{tensor.name} is already moved in this idle period by migration {other}"
            yield wrong(ViolationKind.OVERLAP, message)
        else:
            seen[m.tensor_id, period] = index


def _format_windows(tensor: Tensor) -> str:
    text = ", ".join(f"{start} to {end}" for start, end in tensor.windows[:6])
    return text + (" and later" if len(tensor.windows) > 6 else "")


def _period(tensor: Tensor, num_sites: int, m: Migration) -> int | None:
    """Number of the idle period that holds the migration, None if there is none."""
    windows = tensor.windows
    number = bisect_right(windows, m.leave, key=itemgetter(1)) - 1
    if number < 0 or (number + 1 == len(windows) and not tensor.persistent):
        return None
    ends = number + 1 < len(windows)
    idle_to = windows[number + 1][0] if ends else windows[0][0] + num_sites
    return number if m.needed <= idle_to else None


def _check_clean(plan: Plan, view: DeviceView) -> Iterator[Violation]:
    """A copy may be relied on if the tensor was written to that tier before, and has not changed.

    From the migration backwards: before each idle period is the window of the same number. If the
    tensor changed there, older copies are worthless; if a migration in the period before it wrote
    to the tier, that is the copy; where it was split, it was so at the same place. The periods of a
    persistent tensor go round. Where the host updates a parameter, it has what the device has.
    """
    num_sites = len(plan.trace.sites)
    writes: dict[tuple[int, Tier, int], list[int]] = {}
    cleans: list[tuple[int, Migration, int]] = []
    for index, m in enumerate(plan.migrations):
        if m.leave == m.needed:
            continue
        number = _period(view.tensors[m.tensor_id], num_sites, m)
        if number is None or (m.tier is Tier.HOST and m.tensor_id in view.updated):
            continue
        if m.clean:
            cleans.append((index, m, number))
        else:
            writes.setdefault((m.tensor_id, m.tier, m.host_bytes), []).append(number)
    for numbers in writes.values():
        numbers.sort()
    changes: dict[int, list[int]] = {}
    for index, m, number in cleans:
        tensor = view.tensors[m.tensor_id]
        if m.tensor_id not in changes:
            changes[m.tensor_id] = sorted(_changes(tensor))
        around = len(tensor.windows) if tensor.persistent else None
        changed = _last_before(changes[m.tensor_id], number, around)
        numbers = writes.get((m.tensor_id, m.tier, m.host_bytes), [])
        written = _last_before(numbers, number - 1, around)
        if written is not None and (changed is None or changed <= written):
            continue
        place = f"host and {m.tier} in these parts" if m.host_bytes else m.tier
        message = f"migration {index}: no earlier migration wrote {tensor.name} to {place}"
        if changed is not None:
            message += f" since it changed in window {changed % len(tensor.windows)}"
        yield Violation(kind=ViolationKind.CLEAN, message=message, migration=index)


def _last_before(numbers: Sequence[int], at: int, around: int | None) -> int | None:
    """The last of sorted `numbers` up to `at`, where there are `around` that go round."""
    count = bisect_right(numbers, at)
    if count:
        return numbers[count - 1]
    return numbers[-1] - around if numbers and around is not None else None


def _changes(tensor: Tensor) -> set[int]:
    if tensor.changed_in is not None:
        return set(tensor.changed_in)
    if tensor.kind is TensorKind.ACTIVATION and not tensor.persistent:
        return set()
    return set(range(len(tensor.windows)))


def _add(levels: list[int], start: int, end: int, nbytes: int) -> None:
    """Adds `nbytes` to the differences `levels` over intervals start .. end-1, modulo the step."""
    num_sites = len(levels)
    if start == end:
        return
    while start >= num_sites:
        start, end = start - num_sites, end - num_sites
    levels[start] += nbytes
    if end < num_sites:
        levels[end] -= nbytes
    elif end > num_sites:
        levels[0] += nbytes
        levels[end - num_sites] -= nbytes


def _running(levels: list[int]) -> list[int]:
    total, result = 0, []
    for level in levels:
        total += level
        result.append(total)
    return result


def _resident(num_sites: int, tensors: Sequence[Tensor]) -> list[int]:
    """Differences of the bytes of listed tensors on the device if nothing moves."""
    levels = [0] * num_sites
    for tensor in tensors:
        if tensor.persistent:
            _add(levels, 0, num_sites, tensor.nbytes)
        else:
            _add(levels, tensor.windows[0][0], tensor.windows[-1][1], tensor.nbytes)
    return levels


def _managed(plan: Plan, view: DeviceView) -> list[int]:
    """Bytes of listed tensors on the device in each interval."""
    levels = _resident(len(plan.trace.sites), view.tensors)
    for start, end, nbytes in view.moving:
        _add(levels, start, end, nbytes)
    for m in plan.migrations:
        _add(levels, m.gone, m.back, -plan.trace.tensors[m.tensor_id].nbytes)
    return _running(levels)


def _uses(m: Migration, tier: Tier) -> bool:
    return m.tier is tier or (m.host_bytes > 0 and tier is Tier.HOST)


def _bytes_in(m: Migration, tier: Tier, nbytes: int) -> int:
    """How many of the tensor's `nbytes` are in a tier that the migration uses."""
    if m.host_bytes > 0:
        return m.host_bytes if tier is Tier.HOST else nbytes - m.host_bytes
    return nbytes


def _occupied(plan: Plan, view: DeviceView, tier: Tier) -> list[int]:
    """Bytes in another tier in each interval; a copy stays while a clean migration relies on it.

    Two rounds over the step: a clean one early in the step relies on a copy of the step before.
    """
    num_sites = len(plan.trace.sites)
    levels = [0] * num_sites
    if tier is Tier.HOST:
        _add(levels, 0, num_sites, view.host_bytes)
    open_since: dict[int, tuple[int, int, int]] = {}
    """From where to where the copy of a tensor is there, and its bytes."""
    first_round: set[int] = set()
    """Tensors whose open copy was written in the first round."""
    held = view.updated if tier is Tier.HOST else frozenset[int]()
    here = sorted(
        (m for m in plan.migrations if _uses(m, tier) and m.tensor_id not in held),
        key=lambda m: m.leave,
    )
    for shift in (0, num_sites):
        for m in here:
            leave, needed = m.leave + shift, m.needed + shift
            nbytes = _bytes_in(m, tier, plan.trace.tensors[m.tensor_id].nbytes)
            since = open_since.get(m.tensor_id)
            if m.clean and since is not None:
                open_since[m.tensor_id] = (since[0], needed, since[2])
            elif not m.clean:
                if since is not None and m.tensor_id in first_round:
                    _add(levels, *since)
                open_since[m.tensor_id] = (leave, needed, nbytes)
                (first_round.discard if shift else first_round.add)(m.tensor_id)
    return _running(levels)


def _check_memory(plan: Plan, kept: Plan, view: DeviceView) -> Iterator[Violation]:
    trace, budgets, hardware, said = plan.trace, plan.budgets, plan.hardware, plan.prediction
    managed = _managed(plan, view)
    everything = _running(_resident(len(trace.sites), kept.trace.tensors))
    fixed = [trace.state_bytes + site.workspace_bytes for site in trace.sites]
    unlimited = [
        trace.state_bytes + site.workspace_bytes + nbytes
        for site, nbytes in zip(kept.trace.sites, everything, strict=True)
    ]
    device = [
        a + (trace.state_bytes if site in view.idle_sites else b)
        for site, (a, b) in enumerate(zip(managed, fixed, strict=True))
    ]
    host, storage = (_occupied(plan, view, tier) for tier in (Tier.HOST, Tier.STORAGE))
    limits = (
        (
            ViolationKind.DEVICE_BUDGET,
            device,
            min(budgets.device_bytes, hardware.device_capacity_bytes),
        ),
        (ViolationKind.HOST_BUDGET, host, max(0, hardware.host_room_bytes(budgets.host_bytes))),
        (
            ViolationKind.STORAGE_BUDGET,
            storage,
            min(budgets.storage_bytes, hardware.storage_capacity_bytes),
        ),
    )
    for kind, curve, limit in limits:
        site = max(range(len(curve)), key=curve.__getitem__, default=0)
        if curve and curve[site] > limit:
            message = (
                f"{format_nbytes(curve[site])} at site {site} "
                f"({_site_name(trace, site)}), {format_nbytes(curve[site] - limit)} over the "
                f"limit of {format_nbytes(limit)}"
            )
            yield Violation(kind=kind, message=message, site=site)
    yield from _compare("device_peak_bytes", said.device_peak_bytes, max(device, default=0))
    yield from _compare(
        "unlimited_peak_bytes", said.unlimited_peak_bytes, max(unlimited, default=0)
    )
    yield from _compare("managed_peak_bytes", said.managed_peak_bytes, max(managed, default=0))
    yield from _compare("host_peak_bytes", said.host_peak_bytes, max(host, default=0))
    yield from _compare("storage_peak_bytes", said.storage_peak_bytes, max(storage, default=0))


def _site_name(trace: StepTrace, site: int) -> str:
    entry = trace.sites[site]
    name = "" if entry.tensor_id is None else f" {trace.tensors[entry.tensor_id].name}"
    return f"{entry.kind}{name} in {entry.graph}"


def _compare(name: str, said: int, found: int) -> Iterator[Violation]:
    if said != found:
        message = f"{name} is {said} in the plan, {found} follows from its migrations"
        yield Violation(kind=ViolationKind.PREDICTION, message=message)


def _check_times(plan: Plan, kept: Plan, view: DeviceView) -> Iterator[Violation]:
    said, sites = plan.prediction, plan.trace.sites
    ideal_ns = sum(site.duration_ns for site in kept.trace.sites)
    yield from _compare("ideal_ns", said.ideal_ns, ideal_ns)
    computed_ns = sum(site.duration_ns for site in sites)
    least_ns = computed_ns - sum(sites[k].duration_ns for k in view.idle_sites)
    if said.step_ns < least_ns:
        message = f"step_ns is {said.step_ns}, less than the step without waits, {least_ns}"
        yield Violation(kind=ViolationKind.PREDICTION, message=message)
    if said.bound_ns > said.step_ns:
        message = f"step_ns is {said.step_ns}, less than its lower bound, {said.bound_ns}"
        yield Violation(kind=ViolationKind.PREDICTION, message=message)
    for tier in Tier:
        moved = [m for m in plan.migrations if _uses(m, tier)]
        sizes = [_bytes_in(m, tier, plan.trace.tensors[m.tensor_id].nbytes) for m in moved]
        written = sum(n for m, n in zip(moved, sizes, strict=True) if not m.clean)
        gradients, parameters = view.traffic if tier is Tier.HOST else (0, 0)
        out, back = written + gradients, sum(sizes) + parameters
        yield from _compare(f"out_bytes of {tier}", said.out_bytes.get(tier, 0), out)
        yield from _compare(f"back_bytes of {tier}", said.back_bytes.get(tier, 0), back)
