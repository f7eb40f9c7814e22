"""RunRecords <-> JSON: a plan and what happened in the steps that ran under it.

    {"schema": "teraplan.runs", "schema_version": 7, "plan": {...}, "runs": [{"step": 7, ...}, ...]}

One step per line. Transfers and stalls are rows of columns in the order of the classes' fields.
"""

from collections.abc import Sequence
from pathlib import Path

from teraplan.files.json_files import Node, load, require_schema, write_object
from teraplan.files.plan_file import PLAN_FIELDS, decode_plan, encode_plan, plan_in
from teraplan.values.hardware import Tier
from teraplan.values.plan import Plan
from teraplan.values.run_record import Direction, RunRecord, StallRecord, TransferRecord

SCHEMA = "teraplan.runs"
# 1 (2026-11): first version.
# 2 (2026-11): version 2 of plans.
# 3 (2026-11): version 3 of plans.
# 4 (2026-11): version 4 of plans.
# 5 (2026-11): version 5 of plans.
# 6 (2026-11): version 6 of plans; for some days of version 7, too.
# 7 (2026-11): version 7 of plans.
SCHEMA_VERSION = 7
READABLE_VERSIONS = (1, 2, 3, 4, 5, 6, 7)

_INTS = ("step", "duration_ns", "device_peak_bytes", "managed_peak_bytes")
_COLUMNS = ("site_start_ns", "managed_bytes")
_RUN_FIELDS = (*_INTS, *_COLUMNS, "transfers", "stalls")


def write_runs(path: Path, plan: Plan, records: Sequence[RunRecord]) -> None:
    """Writes `plan` and the steps that ran under it to `path`, whole or not at all."""
    value: dict[str, object] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "plan": encode_plan(plan),
        "runs": [_encode_run(record) for record in records],
    }
    write_object(value, path)


def read_runs(path: Path) -> tuple[Plan, tuple[RunRecord, ...]]:
    """The plan and the steps in the file at `path`.

    Raises:
        FileFormatError: if the file is not such a file; names the field.
    """
    return _runs_in(load(path))


def read_plan_or_runs(path: Path) -> tuple[Plan, tuple[RunRecord, ...]]:
    """The plan in a plan file or run file, and the steps that ran under it; the file is read once.

    Raises:
        FileFormatError: if it is neither; names the field.
    """
    root = load(path)
    if root.get("schema").text() == SCHEMA:
        return _runs_in(root)
    return plan_in(root), ()


def _runs_in(root: Node) -> tuple[Plan, tuple[RunRecord, ...]]:
    require_schema(root, SCHEMA, READABLE_VERSIONS)
    root.only(("schema", "schema_version", "plan", "runs"))
    plan = decode_plan(root.get("plan").only(PLAN_FIELDS))
    return plan, tuple(_decode_run(node) for node in root.get("runs").items())


def _encode_run(record: RunRecord) -> dict[str, object]:
    value: dict[str, object] = {name: getattr(record, name) for name in (*_INTS, *_COLUMNS)}
    return value | {
        "transfers": [
            [t.tensor, t.nbytes, t.direction.value, t.tier.value, t.store, t.start_ns, t.end_ns]
            for t in record.transfers
        ],
        "stalls": [[s.site, s.tensor, s.start_ns, s.duration_ns] for s in record.stalls],
    }


def _decode_run(node: Node) -> RunRecord:
    node.only(_RUN_FIELDS)
    step, duration_ns, device_peak, managed_peak = (node.get(name).integer() for name in _INTS)
    return RunRecord(
        step=step,
        duration_ns=duration_ns,
        device_peak_bytes=device_peak,
        managed_peak_bytes=managed_peak,
        site_start_ns=node.get("site_start_ns").integers(),
        managed_bytes=node.get("managed_bytes").integers(),
        transfers=tuple(_decode_transfer(item) for item in node.get("transfers").items()),
        stalls=tuple(_decode_stall(item) for item in node.get("stalls").items()),
    )


def _row(node: Node, length: int) -> list[Node]:
    items = node.items()
    if len(items) != length:
        raise node.fail(f"has {len(items)} items, expected {length}")
    return items


def _one_of(node: Node, allowed: Sequence[str]) -> str:
    if node.text() not in allowed:
        raise node.fail(f'"{node.text()}" is not one of {", ".join(allowed)}')
    return node.text()


def _decode_transfer(node: Node) -> TransferRecord:
    tensor, nbytes, direction, tier, store, start_ns, end_ns = _row(node, 7)
    return TransferRecord(
        tensor=tensor.text(),
        nbytes=nbytes.integer(),
        direction=Direction(_one_of(direction, [d.value for d in Direction])),
        tier=Tier(_one_of(tier, [t.value for t in Tier])),
        store=store.text(),
        start_ns=start_ns.integer(),
        end_ns=end_ns.integer(),
    )


def _decode_stall(node: Node) -> StallRecord:
    site, tensor, start_ns, duration_ns = _row(node, 4)
    return StallRecord(
        site=site.integer(),
        tensor=tensor.text(),
        start_ns=start_ns.integer(),
        duration_ns=duration_ns.integer(),
    )
