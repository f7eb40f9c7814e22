"""Configuration files, and what is said of wrong ones."""

import os
import re
import threading
from pathlib import Path

import pytest

from teraplan import bounded_file
from teraplan.config import Config
from teraplan.errors import ConfigError


def from_file(tmp_path: Path, text: str, **options: object) -> Config:
    """The configuration from a TOML file with this text, and options."""
    path = tmp_path / "teraplan.toml"
    path.write_text(text)
    return Config.resolve(options, {"TERAPLAN_CONFIG": str(path)})


def test_a_file_has_lists(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert from_file(tmp_path, f'storage = ["{a}", "{b}"]').storage == (a, b)


def test_unknown_key_in_file_has_path_line_and_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teraplan\.toml: line 3: .*did you mean host_budget"):
        from_file(tmp_path, "# comment\n\nhost_budgett = 1\n")
    with pytest.raises(ConfigError, match=r"teraplan\.toml: line 2: option 'teraplan' does not"):
        from_file(tmp_path, "strict = true\n[teraplan]\nstrict = true\n")


def test_wrong_value_in_file_has_path_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teraplan\.toml: line 2: option device_budget: 0\.5 "):
        from_file(tmp_path, "strict = true\ndevice_budget = 0.5\n")


def test_wrong_value_in_file_is_refused_even_if_an_option_replaces_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        from_file(tmp_path, "profile_steps = 0\n", profile_steps=3)


def test_malformed_file_has_path_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teraplan\.toml: is not TOML: .*line 2"):
        from_file(tmp_path, "strict = true\nhost_budget = = 3\n")
    path = tmp_path / "latin.toml"
    path.write_bytes(b'\n\npolicy = "\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml: line 3: is not UTF-8"):
        Config.from_env({"TERAPLAN_CONFIG": str(path)})
    with pytest.raises(ConfigError, match=r"teraplan\.toml: is not TOML: .*recursion"):
        from_file(tmp_path, f"a = {'[' * 5000}{']' * 5000}\n")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert from_file(tmp_path, "\ufeffstrict = true\n").strict


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: cannot be read: No such file"):
        Config.from_env({"TERAPLAN_CONFIG": str(path)})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Config.from_env({"TERAPLAN_CONFIG": str(tmp_path)})


@pytest.mark.parametrize("number", ["1" * 10_000, "0x" + "f" * 10_000])
def test_numbers_of_thousands_of_digits_in_a_file(tmp_path: Path, number: str) -> None:
    with pytest.raises(ConfigError, match=r"teraplan\.toml: .*thousands of digits"):
        from_file(tmp_path, f"device_budget = {number}\n")


def test_only_small_files_are_configuration(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for name, problem in ((str(path), "has 1099511627776 bytes"), ("/dev/zero", "is a device")):
        with pytest.raises(ConfigError, match=rf"{name}: {problem}.* \(TERAPLAN_CONFIG names"):
            Config.from_env({"TERAPLAN_CONFIG": name})


def test_a_pipe_that_nobody_writes_to_is_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_file, "WRITER_WAIT_S", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"is a pipe, and nobody writes to it \(TERAPLAN_CONFIG"):
        Config.from_env({"TERAPLAN_CONFIG": str(path)})


def test_a_file_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text("strict = true\n"))
    writer.start()
    assert Config.from_env({"TERAPLAN_CONFIG": str(path)}).strict
    writer.join(20)
