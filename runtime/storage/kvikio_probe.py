"""Whether kvikio works here, found out in a subprocess with a time limit, once per boot.

kvikio needs libcuda even for host memory; cuFile hangs for ever (100 % CPU) where /proc/modules
does not exist, as in Firecracker and gVisor guests; a wrong driver makes it crash. None of that may
happen to a training run, so nothing imports kvikio before this probe has proved it.
"""

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from teraplan.runtime.storage.cache_directory import boot_id, keep, load

TIME_LIMITS_S = {"host": 10.0, "gds": 60.0}
"""GDS needs torch and a CUDA context, which on a busy machine with many GPUs take their time."""
_VERSION = 1
_MAX_AGE_S = 365 * 24 * 3600.0  # the boot in the key ends it sooner


@dataclass(frozen=True, slots=True, kw_only=True)
class KvikioFacts:
    """What kvikio can do on this machine. A reason is "" where it works."""

    version: str
    why_no_host: str
    why_no_gds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Of one way to use kvikio."""

    reason: str
    """Why it does not work; "" if it does."""
    version: str = ""
    """Of kvikio, if it could be imported."""
    is_late: bool = False
    """There was none in time."""


def probe(directory: Path, *, refresh: bool = False) -> KvikioFacts:
    """What kvikio can do with files in `directory`; at most 70 s the first time after a boot.

    What takes too long may only be slow at the time, and is tried again the next time.
    """
    if importlib.util.find_spec("kvikio") is None:
        missing = "kvikio is not installed; pip install 'teraplan[gds-cu13]' or [gds-cu12]"
        return KvikioFacts(version="", why_no_host=missing, why_no_gds=missing)
    device = os.stat(directory).st_dev
    surroundings = f"{sys.path} {os.environ.get('LD_LIBRARY_PATH', '')}"
    key = f"kvikio {platform.node()} {boot_id()} {_installed()} {device} {surroundings}"
    kept = None if refresh else load(key, version=_VERSION, max_age_s=_MAX_AGE_S)
    if kept is not None:
        return KvikioFacts(**{name: str(kept.get(name)) for name in KvikioFacts.__slots__})
    host, hopeless = _run("host", directory), _gds_is_hopeless()
    gds = _Answer(reason=hopeless) if hopeless else _run("gds", directory)
    version = gds.version or host.version or _installed()
    facts = KvikioFacts(version=version, why_no_host=host.reason, why_no_gds=gds.reason)
    if not (host.is_late or gds.is_late):
        keep(key, asdict(facts), version=_VERSION)
    return facts


def _installed() -> str:
    for name in ("kvikio-cu13", "kvikio-cu12"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _gds_is_hopeless() -> str:
    # Without these cuFile hangs or falls back to its own copies, so it is not even tried.
    if not Path("/proc/modules").exists():
        return "/proc/modules does not exist (a guest without modules), where cuFile hangs"
    if not Path("/run/udev").exists():
        return "/run/udev does not exist, which cuFile needs to know the disk"
    has_p2p = os.environ.get("CUFILE_USE_PCIP2PDMA", "").lower() in {"1", "true"}
    if not Path("/proc/driver/nvidia-fs").exists() and not has_p2p:
        return "the nvidia-fs kernel module is not loaded"
    return ""


def _run(way: str, directory: Path) -> _Answer:
    limit_s = TIME_LIMITS_S[way]
    with tempfile.TemporaryDirectory(prefix="teraplan-probe-") as logs:
        environment = os.environ | {
            "KVIKIO_COMPAT_MODE": "AUTO" if way == "gds" else "ON",
            "CUFILE_LOGFILE_PATH": f"{logs}/cufile.log",  # else it lies in the current directory
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        child = str(Path(__file__).with_name("kvikio_child.py"))
        process = subprocess.Popen(
            [sys.executable, child, way, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=logs,
            start_new_session=True,  # so that its whole group can be ended
        )
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            reason = f"the probe hung and was ended after {limit_s:g} s"
            return _Answer(reason=reason, is_late=True)
    return _understand(process.returncode, output, errors)


def _understand(code: int, output: str, errors: str) -> _Answer:
    if code < 0:
        return _Answer(reason=f"the probe crashed with {signal.Signals(-code).name}")
    try:
        answer = json.loads(output.strip().splitlines()[-1])
        return _Answer(version=str(answer["version"]), reason=str(answer["reason"]))
    except (IndexError, ValueError, KeyError, TypeError):
        last = errors.strip().splitlines()[-1:] or [f"the probe ended with code {code}"]
        return _Answer(reason=last[0])
