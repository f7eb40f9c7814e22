"""The top-level folders are the packages teraplan.passes and teraplan.runtime in every form."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import teraplan

REPO = Path(__file__).resolve().parents[2]
CODE = ("teraplan", "passes", "runtime", "tests", "bench")


def our_files() -> set[Path]:
    """All Python files of the checkout, each once."""
    return {path.resolve() for folder in CODE for path in (REPO / folder).rglob("*.py")}


def build(kind: str, source: Path, target: Path) -> Path:
    """The sdist or wheel that the build backend makes of `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(target.iterdir())


def wheel_contents(wheel: Path) -> dict[str, str]:
    """Hash of each file of a wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.mark.parametrize("folder", ["passes", "runtime"])
def test_package_link_points_to_the_top_level_folder(folder: str) -> None:
    link = REPO / "teraplan" / folder
    assert link.is_symlink(), f"{link} must be a symlink; check out with core.symlinks=true"
    assert link.resolve() == REPO / folder


def test_no_module_has_a_second_copy() -> None:
    """`import passes` works from the repository's root, and would double every class."""
    code = (
        "import sys, teraplan.passes, teraplan.runtime\n"
        "assert not {'passes', 'runtime'} & sys.modules.keys(), 'top-level name imported'\n"
        "assert teraplan.passes.__name__ == 'teraplan.passes'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)
    assert not {"passes", "runtime"} & sys.modules.keys()


def test_nothing_imports_the_top_level_names() -> None:
    wrong = ("import passes", "import runtime", "from passes", "from runtime")
    offenders = [
        f"{path}:{number}"
        for path in our_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip().startswith(wrong)
    ]
    assert not offenders


@pytest.mark.parametrize("module", ["teraplan", "teraplan.cli", "teraplan.planners"])
def test_importing_it_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_version_is_the_one_of_the_package() -> None:
    text = (REPO / "pyproject.toml").read_text()
    assert f'\nversion = "{teraplan.__version__}"\n' in text


@pytest.mark.slow
def test_sdist_and_checkout_build_the_same_wheel(tmp_path: Path) -> None:
    wheel = build("wheel", REPO, tmp_path / "wheel")
    sdist = build("sdist", REPO, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = next((tmp_path / "unpacked").iterdir())
    again = build("wheel", unpacked, tmp_path / "again")
    contents = wheel_contents(wheel)
    assert contents == wheel_contents(again)
    modules = {
        Path("teraplan" if folder == "teraplan" else f"teraplan/{folder}")
        / path.relative_to(REPO / folder)
        for folder in ("teraplan", "passes", "runtime")
        for path in (REPO / folder).rglob("*.py")
    }
    assert modules <= {Path(name) for name in contents}
    assert not {name for name in contents if name.startswith(("passes", "runtime", "tests"))}


def test_pyright_checks_every_file() -> None:
    """Pyright does not follow links, so a wrong `include` passes by checking nothing."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pyright"]
    included = {
        (Path(folder) / name).resolve()
        for start in settings["include"]
        for folder, _, names in os.walk(REPO / start, followlinks=False)
        for name in names
    }
    assert our_files() <= included
