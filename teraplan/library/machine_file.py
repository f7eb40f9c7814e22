"""Machine <-> JSON: what `--hardware` reads and `teraplan hardware` writes.

    {"schema": "teraplan.hardware", "schema_version": 3, "hardware": {...},
     "flops_per_s": {"bfloat16": 835000000000000, ...}, "memory_bytes_per_s": n,
     "sources": {"device": "NVIDIA H100 datasheet ...", ...}}

`hardware` is as in a plan file. The rest is needed only to make traces without the hardware.
"""

from pathlib import Path
from types import MappingProxyType

from teraplan.files.json_files import Node, load_object, write_object
from teraplan.files.plan_file import decode_hardware, encode_hardware
from teraplan.library.machines import Machine, Processor, machine_named

SCHEMA = "teraplan.hardware"
# 1 (2026-11): first version.
# 2 (2026-11): `hardware.host_cores`.
# 3 (2026-11): `hardware.staging_bytes`.
SCHEMA_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)


def write_machine(machine: Machine, path: Path) -> None:
    """Writes `machine` to `path`, whole or not at all."""
    write_object(
        {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "hardware": encode_hardware(machine.hardware),
            "flops_per_s": dict(machine.processor.flops_per_s),
            "memory_bytes_per_s": machine.processor.memory_bytes_per_s,
            "sources": dict(machine.sources),
        },
        path,
    )


def read_machine(path: Path) -> Machine:
    """The machine in the file at `path`.

    Raises:
        FileFormatError: if the file is not such a file; names the field.
    """
    root = load_object(path, SCHEMA, READABLE_VERSIONS)
    root.only(
        (
            "schema",
            "schema_version",
            "hardware",
            "flops_per_s",
            "memory_bytes_per_s",
            "sources",
        )
    )
    flops, sources = root.get("flops_per_s"), root.get("sources")
    return Machine(
        hardware=decode_hardware(root.get("hardware")),
        processor=Processor(
            flops_per_s=MappingProxyType(
                {dtype: _speed(flops.get(dtype)) for dtype in flops.field_names()}
            ),
            memory_bytes_per_s=_speed(root.get("memory_bytes_per_s")),
        ),
        sources=MappingProxyType(
            {name: sources.get(name).text() for name in sources.field_names()}
        ),
    )


def find_machine(name: str) -> Machine:
    """The machine in the file `name`, if it ends in .json, else of the library.

    Raises:
        FileFormatError: if the file cannot be read as one.
        ConfigError: if the library has no such machine.
    """
    return read_machine(Path(name)) if name.endswith(".json") else machine_named(name)


def _speed(node: Node) -> int:
    value = node.integer()
    if value == 0:
        raise node.fail("is 0; a device that never finishes cannot be planned for")
    return value
