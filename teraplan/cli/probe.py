"""`teraplan probe`: how fast the links of this machine are."""

import argparse
from pathlib import Path

from teraplan.cli.command import DONE, Command, emit, emit_json
from teraplan.hardware import Link
from teraplan.report.machine_text import links_json, links_text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="storage directories to be measured together",
    )
    parser.add_argument(
        "--refresh", action="store_true", help="measure again, even if there is a cached result"
    )


def _run(options: argparse.Namespace) -> int:
    links = _measure(tuple(options.storage), refresh=options.refresh)
    if options.json:
        emit_json(links_json(links))
    elif links:
        emit(links_text(links))
    else:
        emit("Nothing to measure: no accelerator, and no directory given with --storage.")
    return DONE


def _measure(directories: tuple[Path, ...], *, refresh: bool) -> list[tuple[str, Link]]:
    from teraplan.runtime.links import host_link, storage_link

    links: list[tuple[str, Link]] = []
    host = host_link(refresh=refresh)
    if host is not None:
        links.append(("host", host))
    if directories:
        links.append(("storage", storage_link(directories, refresh=refresh)))
    return links


COMMAND = Command(
    name="probe",
    summary="measures the links to host memory and storage",
    description=(
        "Measures how fast bytes leave the device and come back, over each link alone and in both\n"
        "directions at once. Results are kept per machine and used by planning; --refresh\n"
        "measures again. Takes a few seconds per link."
    ),
    example="teraplan probe --storage /mnt/nvme0 --refresh",
    add_arguments=_add_arguments,
    run=_run,
)
