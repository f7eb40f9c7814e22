"""Machines by name: "h100-nvl:ssd=4:host=512GiB" is one H100 NVL with four SSDs.

Every figure says where it is from. Figures of the makers are peaks; what is reached is a part of
them, which the cost model (`costs`) and the measured links below stand for. A figure marked
"assumed" has no source, and a machine that matters should be measured with `teraplan probe`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from teraplan.errors import ConfigError
from teraplan.files.json_files import MAX_INT
from teraplan.near_names import nearest
from teraplan.units import format_nbytes, parse_nbytes
from teraplan.values.hardware import Hardware, HostCores, Link

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """How fast a device computes."""

    flops_per_s: Mapping[str, int]
    """Peak of matrix operations by dtype, dense."""
    memory_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine: what planning needs of it, what the cost model needs, and where it is from."""

    hardware: Hardware
    processor: Processor
    sources: Mapping[str, str]
    """Source of each figure, by what it is a figure of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    name: str
    memory_bytes: int
    processor: Processor
    bus: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    link: Link
    source: str


def _link(out: float, back: float, out_both: float, back_both: float, latency_us: int) -> Link:
    """A link; speeds in GB/s."""
    return Link(
        out_bytes_per_s=int(out * GB),
        back_bytes_per_s=int(back * GB),
        out_while_back_bytes_per_s=int(out_both * GB),
        back_while_out_bytes_per_s=int(back_both * GB),
        latency_ns=latency_us * 1000,
    )


def _processor(fp32: float, bf16: float, memory_gb_per_s: float) -> Processor:
    flops = {"float32": int(fp32 * 1e12), "bfloat16": int(bf16 * 1e12), "float16": int(bf16 * 1e12)}
    return Processor(
        flops_per_s=MappingProxyType(flops), memory_bytes_per_s=int(memory_gb_per_s * GB)
    )


_DEVICES = {
    "a100": _Device(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * GB,
        processor=_processor(19.5, 312, 2039),
        bus="pcie4",
        source="NVIDIA A100 datasheet: 80 GB, 2,039 GB/s, 19.5 TFLOPS FP32, 312 TFLOPS BF16",
    ),
    "h100-nvl": _Device(
        name="NVIDIA H100 NVL",
        memory_bytes=94 * GB,
        processor=_processor(60, 835, 3900),
        bus="pcie5",
        source="NVIDIA H100 datasheet, column NVL: 94 GB, 3.9 TB/s, 60 TFLOPS FP32, 1,671 TFLOPS "
        "BF16 with sparsity, so 835 dense",
    ),
    "h100-sxm": _Device(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GB,
        processor=_processor(67, 989, 3350),
        bus="pcie5",
        source="NVIDIA H100 datasheet, column SXM: 80 GB, 3.35 TB/s, 67 TFLOPS FP32, 1,979 TFLOPS "
        "BF16 with sparsity, so 989 dense",
    ),
    "h200": _Device(
        name="NVIDIA H200",
        memory_bytes=141 * GB,
        processor=_processor(67, 989, 4800),
        bus="pcie5",
        source="NVIDIA H200 datasheet: 141 GB, 4.8 TB/s; computes as the H100 SXM does",
    ),
    "rtx-4090": _Device(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * GB,
        processor=_processor(82.6, 165.2, 1008),
        bus="pcie4",
        source="NVIDIA Ada architecture white paper: 24 GB, 1,008 GB/s, 82.6 TFLOPS FP32, 165.2 "
        "TFLOPS BF16 dense with FP32 accumulation",
    ),
    "gh200": _Device(
        name="NVIDIA GH200 480GB",
        memory_bytes=96 * GB,
        processor=_processor(67, 989, 4000),
        bus="c2c",
        source="NVIDIA GH200 datasheet: 96 GB HBM3, 4 TB/s, 480 GB LPDDR5X; computes as the H100",
    ),
}
DEVICES: tuple[str, ...] = tuple(_DEVICES)

_BUSES = {
    "pcie4": _Path(
        link=_link(25.0, 25.0, 20.0, 20.0, 15),
        source="25 to 26 GB/s one way with an A100: github.com/NVIDIA/nvbandwidth/issues/11; "
        "both ways at once 80 % of it: assumed (that report has 24 and 12); latency assumed",
    ),
    "pcie5": _Path(
        link=_link(52.8, 52.8, 42.2, 42.2, 15),
        source="52.8 GB/s from an H100: github.com/NVIDIA/nvbandwidth/issues/24; the other way "
        "the same, and both at once 80 % of it: assumed; latency assumed",
    ),
    "c2c": _Path(
        link=_link(170.0, 411.0, 170.0, 240.0, 10),
        source="411 GB/s to the device, 170 from it: measurements in Megatron-LM pull request "
        "6491; both at once at most 410 together: assumed; latency assumed",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    update_bytes_per_s: int | None
    """Published; None: nobody has."""
    memory_bytes_per_s: int
    source: str


_HOSTS = {
    "pcie4": _Host(
        update_bytes_per_s=int(0.745e9 * 28),
        memory_bytes_per_s=int(204.8e9),
        source="0.745 G parameters/s of Adam for each of four A100s at once, 28 bytes each: logs "
        "of Deep Optimizer States (github.com/DataStates/artifacts); memory: eight channels of "
        "DDR4-3200, assumed",
    ),
    "pcie5": _Host(
        update_bytes_per_s=int(1.69e9 * 28),
        memory_bytes_per_s=int(307.2e9),
        source="1.69 G parameters/s of Adam for each of four H100s at once, 28 bytes each: logs of "
        "Deep Optimizer States (github.com/DataStates/artifacts); memory: eight channels of "
        "DDR5-4800, assumed",
    ),
    "c2c": _Host(
        update_bytes_per_s=None,
        memory_bytes_per_s=int(512e9),
        source="memory: NVIDIA GH200 datasheet, up to 512 GB/s of LPDDR5X",
    ),
}
_SSD = _Path(
    link=_link(6.5, 6.7, 4.0, 4.0, 80),
    source="Samsung 990 PRO 2 TB: 6.5 GB/s written, 6.7 read; four of them in RAID-0 moved 16 GB/s "
    "each way: TERAIO (arXiv 2506.06472), section 4; latency assumed",
)
_SSD_BYTES = 2000 * GB
MAX_SSDS = 12
_SSD_COUNTS = tuple(str(count) for count in range(MAX_SSDS + 1))


def machine_named(spec: str) -> Machine:
    """The machine that `spec` names: a device, then options.

    `ssd=N` (0 to 12, default 4); `host=SIZE`; `cores=SIZE`, the bytes that the host's cores update
    in a second, or `cores=published`; `staging=SIZE`, the host memory that bytes for storage pass
    through. Without `cores` updates run on the device alone, without `staging` storage is reached
    straight from the device (GPUDirect Storage).

    Raises:
        ConfigError: if it names none.
    """
    name, *options = spec.split(":")
    device = _DEVICES.get(name)
    if device is None and spec.endswith(".json"):
        raise ConfigError(
            f'"{spec}" is a file, and here one of the machines of the library is wanted, by its '
            f"name: {', '.join(DEVICES)}"
        )
    if device is None:
        near = nearest(name, DEVICES)
        hint = f'did you mean "{near}"? ' if near else ""
        raise ConfigError(
            f'machine "{name}" is not one of {", ".join(DEVICES)}; {hint}'
            "Commands that take a file of hardware, too, know it by .json at the end of its path"
        )
    num_ssds, host_bytes = 4, 480 * GB if name == "gh200" else 512 * GB
    staging_bytes, cores = 0, None
    times = Counter(option.partition("=")[0] for option in options)
    for option in options:
        key, _, value = option.partition("=")
        if times[key] > 1:
            raise ConfigError(f'machine "{spec}": {key} is there {times[key]} times; give it once')
        if key == "ssd" and value in _SSD_COUNTS:
            num_ssds = int(value)
        elif key == "host":
            host_bytes = _size(spec, value)
        elif key == "cores":
            cores = _cores(spec, _HOSTS[device.bus], value)
        elif key == "staging":
            staging_bytes = _size(spec, value)
        else:
            raise ConfigError(
                f'machine "{spec}": "{option}" is not understood; write ssd=N with N from 0 to '
                f"{MAX_SSDS}, host=SIZE such as host=512GiB, cores=published, or staging=512MiB"
            )
    machine = _machine(device, num_ssds, host_bytes, cores, staging_bytes if num_ssds else 0)
    if not machine.hardware.holds_staging:  # no file of it could be read
        raise ConfigError(
            f'machine "{spec}": staging is {format_nbytes(staging_bytes)}, more than the host '
            f"memory that it is in, {format_nbytes(host_bytes)}"
        )
    return machine


def _cores(spec: str, host: _Host, value: str) -> HostCores:
    if value != "published":
        speed = _size(spec, value)
    elif host.update_bytes_per_s is None:
        raise ConfigError(
            f'machine "{spec}": no rate of updates on its cores is published; write one, such as '
            "cores=40GB for 40 GB of gradients, parameters and state read and written in a second"
        )
    else:
        speed = host.update_bytes_per_s
    if speed == 0:
        raise ConfigError(f'machine "{spec}": cores that update nothing; leave cores out')
    return HostCores(update_bytes_per_s=speed, memory_bytes_per_s=host.memory_bytes_per_s)


def _size(spec: str, value: str) -> int:
    try:
        nbytes = parse_nbytes(value)
    except ValueError as error:
        raise ConfigError(f'machine "{spec}": {error}') from error
    if nbytes > MAX_INT:
        raise ConfigError(f'machine "{spec}": {value} is more than files hold, {MAX_INT} bytes')
    return nbytes


def _machine(
    device: _Device,
    num_ssds: int,
    host_bytes: int,
    cores: HostCores | None = None,
    staging_bytes: int = 0,
) -> Machine:
    bus, ssds = _BUSES[device.bus], None
    if num_ssds:
        ssds = Link(
            out_bytes_per_s=_SSD.link.out_bytes_per_s * num_ssds,
            back_bytes_per_s=_SSD.link.back_bytes_per_s * num_ssds,
            out_while_back_bytes_per_s=_SSD.link.out_while_back_bytes_per_s * num_ssds,
            back_while_out_bytes_per_s=_SSD.link.back_while_out_bytes_per_s * num_ssds,
            latency_ns=_SSD.link.latency_ns,
        )
    return Machine(
        hardware=Hardware(
            device=device.name,
            device_capacity_bytes=device.memory_bytes,
            host_capacity_bytes=host_bytes,
            storage_capacity_bytes=_SSD_BYTES * num_ssds,
            host_link=bus.link if host_bytes else None,
            storage_link=ssds,
            device_port=bus.link,
            host_cores=cores if host_bytes else None,
            staging_bytes=staging_bytes,
        ),
        processor=device.processor,
        sources=MappingProxyType(
            {"device": device.source, "host_link": bus.source, "device_port": bus.source}
            | ({"storage_link": _SSD.source} if num_ssds else {})
            | ({"host_cores": _HOSTS[device.bus].source} if cores is not None else {})
        ),
    )


def machine_of_teraio(host_bytes: int) -> Machine:
    """One GPU of TERAIO's machine and its half of the rest.

    H100 NVL; four Samsung 990 PRO of its own with 16 GB/s each way (section 4 of the paper); of
    host memory, what is given.
    """
    plain = _machine(_DEVICES["h100-nvl"], 4, host_bytes)
    hardware = plain.hardware
    return Machine(
        hardware=Hardware(
            device=hardware.device,
            device_capacity_bytes=hardware.device_capacity_bytes,
            host_capacity_bytes=host_bytes,
            storage_capacity_bytes=hardware.storage_capacity_bytes,
            host_link=hardware.host_link if host_bytes else None,
            storage_link=_link(16.0, 16.0, 16.0, 16.0, 80),
            device_port=hardware.device_port,
        ),
        processor=plain.processor,
        sources=plain.sources,
    )
