"""The GDS back end over kvikio's real library and an emulated driver: no GPU is involved.

What it shows: device addresses go through put and get, nothing touches them as host memory, sizes
and offsets are right. What it cannot show: GDS itself, streams, checksums taken on the device.
"""

import importlib.util
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import ctypes, mmap, os, pathlib, sys
    driver = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    from teraplan.runtime.storage import Storage, directories
    from teraplan.runtime.storage.memory import address_of
    import kvikio.defaults
    kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)
    directories.why_not = lambda path, directory: ""

    size = 64 << 20
    device = mmap.mmap(-1, size)
    base = address_of(device)
    driver.emulated_device_memory.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
    driver.emulated_device_memory(base, size)
    with Storage.open(
        [pathlib.Path(sys.argv[2])], path="kvikio-gds", checksum=False, deadline_s=20
    ) as storage:
        assert storage.takes_device_memory
        assert storage.stores[0].path == "kvikio GDS"
        for nbytes in (1, 4096, 100_003, 16384, 9 << 20, (17 << 20) + 77):
            for skew in (0, 512):
                content = os.urandom(nbytes)
                device[skew : skew + nbytes] = content
                record = storage.put(base + skew, nbytes, owner=device, label="act")
                storage.wait(record.write, what="the test")
                landing = (32 << 20) + 256
                transfer = storage.get(record, base + landing, owner=device)
                storage.wait(transfer, what="the test")
                assert device[landing : landing + nbytes] == content, (nbytes, skew)
                storage.drop(record)
        assert storage.bytes_in_use == 0
    assert driver.emulated_copies() > 20
    print("all came back")
"""


def test_device_addresses_go_through_kvikio(disk: Path, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or importlib.util.find_spec("kvikio") is None:
        pytest.skip("needs a C compiler and kvikio (.ci/kvikio_env)")
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).with_name("emulated_driver.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", library, source],
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(library), str(disk)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.stdout == "all came back\n", done.stderr
