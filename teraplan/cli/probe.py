"""`teraplan probe`: how fast the links of this machine are."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, Command, emit, emit_json, require_torch
from teraplan.report.machine_text import links_json, links_text
from teraplan.values.hardware import Link


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="storage directories to be measured",
    )
    parser.add_argument(
        "--refresh", action="store_true", help="measure again, even if there is a cached result"
    )


def _run(options: argparse.Namespace) -> int:
    links = _measure(tuple(options.storage), refresh=options.refresh)
    if options.json:
        emit_json(links_json(links))
    else:
        emit(links_text(links))
        if not options.storage:
            emit("Name directories with --storage to measure them too.")
    return DONE


def _measure(directories: tuple[Path, ...], *, refresh: bool) -> list[tuple[str, Link]]:
    require_torch()
    from teraplan.runtime.links import host_link, storage_link

    links: list[tuple[str, Link]] = []
    # Without an accelerator the device is the CPU, and its link a copy within host memory.
    host = host_link(refresh=refresh) or host_link("cpu", refresh=refresh)
    if host is not None:
        links.append(("host", host))
    if len(directories) > 1:
        links += [(str(path), storage_link((path,), refresh=refresh)) for path in directories]
    if directories:
        links.append(("storage", storage_link(directories, refresh=refresh)))
    return links


COMMAND = Command(
    name="probe",
    summary="measures the links to host memory and storage",
    description=(
        "Measures how fast bytes leave the device and come back, over each link alone and in both\n"
        "directions at once. Several directories are measured one by one and, as they will be\n"
        "used, together (the row `storage`). Results are kept per machine and used by planning;\n"
        "--refresh measures again. Takes a second or two per row."
    ),
    example="teraplan probe --storage /mnt/nvme0 --refresh",
    add_arguments=_add_arguments,
    run=_run,
)
