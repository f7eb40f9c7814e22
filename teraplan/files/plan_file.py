"""Plan <-> JSON, and whether a plan was made for this program.

A plan file stands alone: it holds the trace and the machine that the plan was made for. The part
that people read and edit is `migrations`, one line each, with the tensor's name:

    {"back": 90, "clean": false, "gone": 12, "host_bytes": 0, "leave": 7, "needed": 95,
     "reason": "idle 1.20 s", "tensor": "g0.c0/gelu_3", "tier": "storage"}

and `recomputed`, which names the tensors that are computed again. After an edit,
`teraplan.checker` says whether it still holds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from teraplan.files.json_files import Node, load, require_schema, write_object
from teraplan.files.trace_file import decode_trace, encode_trace
from teraplan.values.hardware import Budgets, Hardware, HostCores, Link, Tier
from teraplan.values.plan import HostUpdate, Migration, Plan, Prediction, Recomputation
from teraplan.values.recomputed_step import independent
from teraplan.values.step_trace import StepTrace

SCHEMA = "teraplan.plan"
# 1 (2026-11): first version.
# 2 (2026-11): `hardware.device_port`, `prediction.bound_ns`, version 2 of traces; what version 1
#   lacks is null, 0 and not known.
# 3 (2026-11): `host_updates`, `hardware.host_cores`, `recomputed`, version 3 of traces; before, all
#   updates were on the device, and nothing was computed again.
# 4 (2026-11): `host_bytes` of migrations; before, each tensor went to one tier as a whole.
# 5 (2026-11): `hardware.staging_bytes`; before, none was counted.
# 6 (2026-11): version 4 of traces.
# 7 (2026-11): `storage_pace`; before, storage was always driven as fast as it can.
SCHEMA_VERSION = 7
READABLE_VERSIONS = (1, 2, 3, 4, 5, 6, 7)

PLAN_FIELDS = (
    "policy",
    "budgets",
    "hardware",
    "trace",
    "migrations",
    "host_updates",
    "recomputed",
    "storage_pace",
    "prediction",
)
_RECOMPUTATION_FIELDS = ("tensor", "reason")
_MIGRATION_FIELDS = (
    "tensor",
    "leave",
    "gone",
    "back",
    "needed",
    "tier",
    "host_bytes",
    "clean",
    "reason",
)
_OTHER_TIERS = tuple(tier for tier in Tier if tier is not Tier.DEVICE)
_BUDGET_FIELDS = ("device_bytes", "host_bytes", "storage_bytes")
_HARDWARE_FIELDS = (
    "device",
    "device_capacity_bytes",
    "host_capacity_bytes",
    "storage_capacity_bytes",
    "host_link",
    "storage_link",
    "device_port",
    "host_cores",
    "staging_bytes",
)
_UPDATE_SITES = ("update", "flush", "gone", "back", "needed")
_CORES_FIELDS = tuple(field.name for field in fields(HostCores))
_LINK_FIELDS = tuple(field.name for field in fields(Link))
_PREDICTION_INTS = (
    "step_ns",
    "ideal_ns",
    "device_peak_bytes",
    "unlimited_peak_bytes",
    "managed_peak_bytes",
    "host_peak_bytes",
    "storage_peak_bytes",
)
_PREDICTION_FIELDS = (*_PREDICTION_INTS, "bound_ns", "out_bytes", "back_bytes", "stall_ns")


def write_plan(plan: Plan, path: Path) -> None:
    """Writes `plan` to `path`, whole or not at all."""
    write_object({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **encode_plan(plan)}, path)


def read_plan(path: Path) -> Plan:
    """The plan in the file at `path`, not yet checked (`check_plan.require_valid`).

    Raises:
        FileFormatError: if the file is not such a file; names the field.
    """
    return plan_in(load(path))


def plan_in(root: Node) -> Plan:
    """The plan in the outer object of a plan file.

    Raises:
        FileFormatError: as `read_plan`.
    """
    require_schema(root, SCHEMA, READABLE_VERSIONS)
    return decode_plan(root.only(("schema", "schema_version", *PLAN_FIELDS)))


def encode_plan(plan: Plan) -> dict[str, object]:
    """The fields of a plan as JSON values, without schema."""
    names = [tensor.name for tensor in plan.trace.tensors]
    prediction = plan.prediction
    stalls = sorted((names[i], ns) for i, ns in prediction.stall_ns.items())
    return {
        "policy": plan.policy,
        "budgets": {name: getattr(plan.budgets, name) for name in _BUDGET_FIELDS},
        "hardware": encode_hardware(plan.hardware),
        "trace": encode_trace(plan.trace),
        "migrations": [
            {
                "tensor": names[m.tensor_id],
                "leave": m.leave,
                "gone": m.gone,
                "back": m.back,
                "needed": m.needed,
                "tier": m.tier.value,
                "host_bytes": m.host_bytes,
                "clean": m.clean,
                "reason": m.reason,
            }
            for m in plan.migrations
        ],
        "host_updates": [
            {name: getattr(h, name) for name in (*_UPDATE_SITES, "reason")}
            for h in plan.host_updates
        ],
        "recomputed": [
            {"tensor": names[choice.tensor_id], "reason": choice.reason}
            for choice in plan.recomputed
        ],
        "storage_pace": _encode_link(plan.storage_pace),
        "prediction": {name: getattr(prediction, name) for name in _PREDICTION_INTS}
        | {
            "bound_ns": prediction.bound_ns,
            "out_bytes": {tier.value: n for tier, n in prediction.out_bytes.items()},
            "back_bytes": {tier.value: n for tier, n in prediction.back_bytes.items()},
            "stall_ns": dict(stalls),
        },
    }


def decode_plan(node: Node) -> Plan:
    """The plan that a JSON object encodes; does not look for unknown fields of the outer object."""
    trace = decode_trace(node.get("trace"))
    ids = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    limit = 2 * len(trace.sites) + 1
    budgets = node.get("budgets").only(_BUDGET_FIELDS)
    return Plan(
        policy=node.get("policy").label(),
        budgets=Budgets(**{name: budgets.get(name).integer() for name in _BUDGET_FIELDS}),
        hardware=decode_hardware(node.get("hardware")),
        trace=trace,
        migrations=tuple(
            _decode_migration(item, trace, ids, limit) for item in node.get("migrations").items()
        ),
        prediction=_decode_prediction(node.get("prediction"), ids),
        host_updates=tuple(
            _decode_host_update(item, trace, limit) for item in node.get("host_updates").items()
        )
        if node.has("host_updates")
        else (),
        recomputed=_decode_recomputed(node, trace, ids),
        storage_pace=_decode_link(node.get("storage_pace")) if node.has("storage_pace") else None,
    )


def _decode_host_update(node: Node, trace: StepTrace, limit: int) -> HostUpdate:
    node.only((*_UPDATE_SITES, "reason"))
    update = node.get("update").integer()
    if update >= len(trace.updates):
        raise node.get("update").fail(f"is {update}; the trace has {len(trace.updates)} updates")
    sites = {name: node.get(name).integer(limit) for name in _UPDATE_SITES[1:]}
    return HostUpdate(update=update, reason=node.get("reason").label(), **sites)


def _decode_recomputed(
    plan: Node, trace: StepTrace, ids: dict[str, int]
) -> tuple[Recomputation, ...]:
    """What is computed again; only tensors of which the trace says how, and none from another."""
    if not plan.has("recomputed"):
        return ()
    found: list[Recomputation] = []
    for item in plan.get("recomputed").items():
        node = item.only(_RECOMPUTATION_FIELDS)
        tensor_id = _decode_tensor(node.get("tensor"), ids)
        found.append(Recomputation(tensor_id=tensor_id, reason=node.get("reason").label()))
    chosen = [choice.tensor_id for choice in found]
    for tensor_id, times in Counter(chosen).items():
        if times > 1:
            name = trace.tensors[tensor_id].name
            raise plan.get("recomputed").fail(f'names "{name}" {times} times')
    for tensor_id in Counter(chosen) - Counter(independent(trace, chosen)):
        name = trace.tensors[tensor_id].name
        raise plan.get("recomputed").fail(
            f'"{name}" cannot be computed again, or not beside the others'
        )
    return tuple(found)


def encode_hardware(hardware: Hardware) -> dict[str, object]:
    """The JSON object of `hardware`."""
    return {
        "device": hardware.device,
        "device_capacity_bytes": hardware.device_capacity_bytes,
        "host_capacity_bytes": hardware.host_capacity_bytes,
        "storage_capacity_bytes": hardware.storage_capacity_bytes,
        "host_link": _encode_link(hardware.host_link),
        "storage_link": _encode_link(hardware.storage_link),
        "device_port": _encode_link(hardware.device_port),
        "host_cores": None
        if hardware.host_cores is None
        else {name: getattr(hardware.host_cores, name) for name in _CORES_FIELDS},
        "staging_bytes": hardware.staging_bytes,
    }


def decode_hardware(node: Node) -> Hardware:
    """The machine that a JSON object encodes."""
    node.only(_HARDWARE_FIELDS)
    hardware = Hardware(
        device=node.get("device").label(),
        device_capacity_bytes=node.get("device_capacity_bytes").integer(),
        host_capacity_bytes=node.get("host_capacity_bytes").integer(),
        storage_capacity_bytes=node.get("storage_capacity_bytes").integer(),
        host_link=_decode_link(node.get("host_link")),
        storage_link=_decode_link(node.get("storage_link")),
        device_port=_decode_link(node.get("device_port")) if node.has("device_port") else None,
        host_cores=_decode_cores(node.get("host_cores")) if node.has("host_cores") else None,
        staging_bytes=node.get("staging_bytes").integer() if node.has("staging_bytes") else 0,
    )
    if not hardware.holds_staging:
        more = f"more than host_capacity_bytes, {hardware.host_capacity_bytes}"
        raise node.get("staging_bytes").fail(f"is {hardware.staging_bytes}, {more}")
    return hardware


def _encode_link(link: Link | None) -> dict[str, int] | None:
    return None if link is None else {name: getattr(link, name) for name in _LINK_FIELDS}


def _decode_link(node: Node) -> Link | None:
    values = _decode_speeds(node, _LINK_FIELDS)
    return None if values is None else Link(**values)


def _decode_cores(node: Node) -> HostCores | None:
    values = _decode_speeds(node, _CORES_FIELDS)
    return None if values is None else HostCores(**values)


def _decode_speeds(node: Node, names: tuple[str, ...]) -> dict[str, int] | None:
    if node.is_null():
        return None
    node.only(names)
    values = {name: node.get(name).integer() for name in names}
    for name, value in values.items():
        if value == 0 and name != "latency_ns":
            raise node.get(name).fail("is 0 bytes per second; write null for what is absent")
    return values


def decode_tier(node: Node, tiers: Sequence[Tier] = tuple(Tier)) -> Tier:
    """The one of `tiers` that a string names."""
    if node.text() not in {tier.value for tier in tiers}:
        stays = "; without a migration a tensor stays" if node.text() == Tier.DEVICE else ""
        raise node.fail(f'"{node.text()}" is not one of {", ".join(tiers)}{stays}')
    return Tier(node.text())


def _decode_tensor(node: Node, ids: dict[str, int]) -> int:
    if node.text() not in ids:
        raise node.fail(f'"{node.text()}" is no tensor of the trace in this file')
    return ids[node.text()]


def _decode_host_bytes(node: Node, tier: Tier, nbytes: int) -> int:
    """The part of a tensor of `nbytes` that goes to host memory beside storage."""
    if not node.has("host_bytes"):
        return 0
    host_bytes = node.get("host_bytes").integer(max(nbytes - 1, 0))
    if host_bytes and tier is not Tier.STORAGE:
        raise node.get("host_bytes").fail(
            f'is {host_bytes} beside the tier "{tier}"; a tensor is split between host and storage,'
            ' and its tier is then "storage"'
        )
    return host_bytes


def _decode_migration(node: Node, trace: StepTrace, ids: dict[str, int], limit: int) -> Migration:
    node.only(_MIGRATION_FIELDS)
    tensor_id, tier = (
        _decode_tensor(node.get("tensor"), ids),
        decode_tier(node.get("tier"), _OTHER_TIERS),
    )
    return Migration(
        tensor_id=tensor_id,
        leave=node.get("leave").integer(limit),
        gone=node.get("gone").integer(limit),
        back=node.get("back").integer(limit),
        needed=node.get("needed").integer(limit),
        tier=tier,
        host_bytes=_decode_host_bytes(node, tier, trace.tensors[tensor_id].nbytes),
        clean=node.get("clean").flag(),
        reason=node.get("reason").label(),
    )


def _decode_prediction(node: Node, ids: dict[str, int]) -> Prediction:
    node.only(_PREDICTION_FIELDS)
    stalls: dict[int, int] = {}
    stall_node = node.get("stall_ns")
    for name in stall_node.field_names():
        if name not in ids:
            raise stall_node.fail(f'"{name}" is no tensor of the trace in this file')
        stalls[ids[name]] = stall_node.get(name).integer()

    def by_tier(field: str) -> dict[Tier, int]:
        tiers = node.get(field).only(tier.value for tier in Tier)
        return {Tier(name): tiers.get(name).integer() for name in tiers.field_names()}

    return Prediction(
        **{name: node.get(name).integer() for name in _PREDICTION_INTS},
        bound_ns=node.get("bound_ns").integer() if node.has("bound_ns") else 0,
        out_bytes=by_tier("out_bytes"),
        back_bytes=by_tier("back_bytes"),
        stall_ns=stalls,
    )
