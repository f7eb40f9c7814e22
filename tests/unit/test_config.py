"""Options, environment variables and configuration files, and what is said of wrong ones."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teraplan.config import Budget, Config, option_names
from teraplan.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("options", ["8GiB", ["device_budget"], 7])
def test_options_that_are_no_dict(options: object) -> None:
    with pytest.raises(ConfigError, match=r"options is .*; expected a dict"):
        Config.resolve(options, {})


def test_defaults() -> None:
    config = Config.resolve(None, {})
    assert config == Config()
    assert config.device_budget is None
    assert config.storage == ()
    assert config.plan == "auto"
    assert config.profile_steps == 2
    assert config.kernels == "inductor"
    assert not config.strict
    assert config.deadline_s == 60.0
    assert config.checksum


def test_option_beats_environment_beats_file(tmp_path: Path) -> None:
    path = tmp_path / "teraplan.toml"
    path.write_text('policy = "teraio"\nprofile_steps = 5\ndeadline_s = 3\nstrict = true\n')
    environ = {
        "TERAPLAN_CONFIG": str(path),
        "TERAPLAN_PROFILE_STEPS": "6",
        "TERAPLAN_DEADLINE_S": "2.5",
        "HOME": "/",
    }
    config = Config.resolve({"deadline_s": 1}, environ)
    assert (config.policy, config.profile_steps, config.deadline_s) == ("teraio", 6, 1.0)
    assert config.strict
    assert Config.from_env(environ).deadline_s == 2.5


def test_from_env_reads_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAPLAN_POLICY", "g10")
    assert Config.from_env().policy == "g10"


def test_an_explicit_none_resets_what_the_environment_set() -> None:
    environ = {"TERAPLAN_DEVICE_BUDGET": "1GiB", "TERAPLAN_REPORT": "/r"}
    config = Config.resolve({"device_budget": None, "report": None}, environ)
    assert config.device_budget is None
    assert config.report is None


def test_empty_variable_counts_as_not_set() -> None:
    assert Config.from_env({"TERAPLAN_POLICY": "", "TERAPLAN_CONFIG": ""}) == Config()


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("500 MB", 500 * 10**6),
        (4096, 4096),
        ("4096", 4096),
        (" 1 kib ", 1024),
        ("4096.0", 4096),
        ("0.5GiB", 1 << 29),
    ],
)
def test_budget_in_bytes(value: object, nbytes: int) -> None:
    budget = Config.resolve({"device_budget": value}, {}).device_budget
    assert budget is not None
    assert budget.resolve(unlimited_peak_bytes=7) == nbytes


@pytest.mark.parametrize(
    ("text", "resolved"), [("60%", 600), ("60.55 %", 605), ("130%", 1301), ("0.01%", 0)]
)
def test_budget_in_percent_of_the_unlimited_peak(text: str, resolved: int) -> None:
    assert Budget.parse(text).resolve(unlimited_peak_bytes=1001 if text == "130%" else 1000) == (
        resolved
    )


@given(st.integers(0, 1 << 50), st.integers(0, 100))
def test_percent_never_exceeds_the_peak(peak: int, percent: int) -> None:
    assert 0 <= Budget(percent=float(percent)).resolve(peak) <= peak


@given(st.integers(0, 1 << 60))
def test_bytes_resolve_to_themselves(nbytes: int) -> None:
    assert Budget.parse(nbytes).resolve(0) == nbytes


def test_budget_prints_as_people_write_it() -> None:
    assert str(Budget.parse("1536 MiB")) == "1.50 GiB"
    assert str(Budget.parse("62.5%")) == "62.5%"


def test_budget_is_bytes_or_percentage() -> None:
    for wrong in ({}, {"nbytes": 1, "percent": 1.0}):
        with pytest.raises(ConfigError, match="either a number of bytes or a percentage"):
            Budget(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    ["", "much", "-1", -1, "-5%", "%", "12 parsecs", "0.5", "1.5 B", 0.6, True, [1],
     "9" * 400 + "GiB", "9" * 400 + "%", float("nan"), "nan%"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["device_budget", "host_budget"])
def test_wrong_budget_names_option_value_and_forms(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"option {name}: .* is not accepted: .*60%"):
        Config.resolve({name: value}, {})


@pytest.mark.parametrize("value", ["", -1, True, "much", "60%", [1]])
@pytest.mark.parametrize("name", ["daily_writes", "endurance"])
def test_wrong_size_suggests_no_percentage(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf'option {name}: .* a size such as "500GB"') as caught:
        Config.resolve({name: value}, {})
    assert 'such as "60%"' not in str(caught.value)


@pytest.mark.parametrize("value", [0, "0", "0%", "0 GiB"])
def test_zero_is_a_host_budget_but_no_device_budget(value: object) -> None:
    host = Config.resolve({"host_budget": value}, {}).host_budget
    assert host is not None
    assert host.is_zero()
    with pytest.raises(ConfigError, match="nothing runs in no memory"):
        Config.resolve({"device_budget": value}, {})


def test_storage_is_one_directory_or_several(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert Config.resolve({"storage": a}, {}).storage == (a,)
    assert Config.resolve({"storage": [a, Path(b)]}, {}).storage == (a, b)
    assert Config.resolve({}, {"TERAPLAN_STORAGE": a + os.pathsep + b}).storage == (a, b)


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    config = Config.resolve({"storage": "spill", "report": "~/r", "plan": "plan.json"}, {})
    assert config.storage == (str(tmp_path / "spill"),)
    assert config.report == "/home/ada/r"
    assert config.plan == str(tmp_path / "plan.json")


def test_the_home_of_a_user_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no such user's home directory"):
        Config.resolve({"report": "~nobody-of-that-name/r"}, {})
    with pytest.raises(ConfigError, match="there is no such user's home directory"):
        Config.from_env({"TERAPLAN_CONFIG": "~nobody-of-that-name/x"})


def test_a_directory_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="/d is named twice"):
        Config.resolve({"storage": ["/d", "d"]}, {})


@pytest.mark.parametrize("value", ["", " ", "a\0b", 3, ["a", ""], {"a": 1}, [None]])
def test_wrong_storage(value: object) -> None:
    with pytest.raises(ConfigError, match=r"option storage: .* is not accepted: expected a "):
        Config.resolve({"storage": value}, {})


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("profile_steps", 0, "at least 1"),
        ("profile_steps", True, "at least 1"),
        ("profile_steps", "2.0", "at least 1"),
        ("profile_steps", "1" * 5000, "at least 1"),
        ("profile_steps", "1000000000", "at most nine digits"),
        ("profile_steps", 1000000000, "at most nine digits"),
        ("policy", "", "name of a policy"),
        ("policy", "../x", "name of a policy"),
        ("policy", 3, "name of a policy"),
        ("kernels", "triton", "inductor, aot_eager"),
        ("kernels", ["inductor"], "inductor, aot_eager"),
        ("training_state", "disk", "auto, moves, stays"),
        ("strict", "maybe", "true or false"),
        ("strict", 1, "true or false"),
        ("checksum", None, "true or false"),
        ("report", "", "a path"),
        ("plan", None, "a path"),
        ("deadline_s", 0, "from 0.1 to 10"),
        ("deadline_s", 0.09, "from 0.1 to 10"),
        ("deadline_s", -1.5, "from 0.1 to 10"),
        ("deadline_s", float("inf"), "from 0.1 to 10"),
        ("deadline_s", float("nan"), "from 0.1 to 10"),
        ("deadline_s", "soon", "from 0.1 to 10"),
        ("deadline_s", True, "from 0.1 to 10"),
    ],
)
def test_wrong_value_says_what_is_accepted(name: str, value: object, accepted: str) -> None:
    with pytest.raises(ConfigError, match=rf"option {name}: .*{accepted}"):
        Config.resolve({name: value}, {})


@pytest.mark.parametrize(
    ("text", "flag"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False)]
)
def test_flags_in_the_environment(text: str, flag: bool) -> None:
    assert Config.from_env({"TERAPLAN_STRICT": text}).strict is flag


def test_unknown_option_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match="did you mean device_budget") as caught:
        Config.resolve({"device_bugdet": 1}, {})
    assert all(name in str(caught.value) for name in option_names())
    with pytest.raises(ConfigError, match="did you mean profile_steps"):
        Config.resolve({"profile-step": 1}, {})


def test_unknown_option_like_no_other_has_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'zzz' does not exist \(there are"):
        Config.resolve({"zzz": 1}, {})


def test_option_names_are_not_environment_names() -> None:
    with pytest.raises(ConfigError, match="'TERAPLAN_STRICT' does not exist; did you mean strict"):
        Config.resolve({"TERAPLAN_STRICT": True}, {})
    with pytest.raises(ConfigError, match="option 3 does not exist"):
        Config.resolve({3: True}, {})


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean TERAPLAN_DEVICE_BUDGET"):
        Config.from_env({"TERAPLAN_DEVICE_BUDGT": "1GiB"})
    with pytest.raises(ConfigError, match="did you mean TERAPLAN_CONFIG"):
        Config.from_env({"TERAPLAN_CONFIGURATION": "x"})


def test_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="environment variable TERAPLAN_HOST_BUDGET: 'x'"):
        Config.from_env({"TERAPLAN_HOST_BUDGET": "x"})


@pytest.mark.parametrize("name", option_names())
@pytest.mark.parametrize(
    "value",
    [torch.tensor([1, 2]), numpy.array([1, 2]), numpy.array(["auto", "never"]), 10**5000,
     [10**5000], [torch.tensor([1, 2])]],
    ids=["tensor", "array", "words", "digits", "list", "tensors"],
)  # fmt: skip
def test_values_that_are_not_compared_or_not_shown(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"option {name}: .* is not accepted"):
        Config.resolve({name: value}, {})


def test_options_that_are_a_number_of_thousands_of_digits() -> None:
    with pytest.raises(ConfigError, match=r"options is a number of .*; expected a dict"):
        Config.resolve(10**5000, {})
    with pytest.raises(ConfigError, match=r"option a number of .* does not exist"):
        Config.resolve({10**5000: 1}, {})


def test_replaying_a_plan_contradicts_a_policy() -> None:
    with pytest.raises(ConfigError, match='policy "g10" would not be used'):
        Config.resolve({"plan": "p.json"}, {"TERAPLAN_POLICY": "g10"})


def test_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="option profile_steps: 0 is not accepted"):
        Config(profile_steps=0)


def test_configs_hash_by_meaning() -> None:
    left = Config.resolve({"device_budget": "1GiB", "storage": ["/s"]}, {})
    right = Config.resolve({}, {"TERAPLAN_DEVICE_BUDGET": "1024 MiB", "TERAPLAN_STORAGE": "/s"})
    assert left == right
    assert hash(left) == hash(right)
    with pytest.raises(dataclasses.FrozenInstanceError):
        left.strict = True  # type: ignore[misc]


def test_importing_config_imports_no_torch() -> None:
    code = "import sys, teraplan.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_the_documented_options_are_the_options() -> None:
    text = (REPO / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(TERAPLAN_\w+)` \| `([^`]*)` \|", text, re.MULTILINE)
    assert tuple(name for name, _, _ in rows) == option_names()
    assert all(variable == f"TERAPLAN_{name.upper()}" for name, variable, _ in rows)
    default = Config()
    assert [value for _, _, value in rows] == [repr(getattr(default, n)) for n in option_names()]


@pytest.mark.parametrize(
    ("value", "parsed"),
    [("never", "never"), ("auto", "auto"), (0.5, 0.5), (1, 1.0), ("0.25", 0.25), ("40 %", 0.4)],
)
def test_host_updates(value: object, parsed: object) -> None:
    assert Config.resolve({"host_updates": value}, {}).host_updates == parsed


@pytest.mark.parametrize(
    "value", [0, 1.5, -0.5, "much", True, None, "0%", "120%", float("nan"), []]
)
def test_wrong_host_updates(value: object) -> None:
    with pytest.raises(ConfigError, match=r"option host_updates: .* never, auto, or a share"):
        Config.resolve({"host_updates": value}, {})


def test_host_updates_need_a_host_budget_in_bytes() -> None:
    with pytest.raises(ConfigError, match=r"host_budget 50% .* set host_budget to a size"):
        Config.resolve({"host_updates": 0.5, "host_budget": "50%"}, {})


def test_updates_are_in_the_backward_or_on_the_host() -> None:
    assert Config.resolve({}, {"TERAPLAN_UPDATE": "gradient"}).update == "gradient"
    with pytest.raises(ConfigError, match=r"option update: 'never' .* one of step, gradient"):
        Config.resolve({"update": "never"}, {})
    with pytest.raises(ConfigError, match=r"host_updates 0.5 is in the step; set one of them"):
        Config.resolve({"update": "gradient", "host_updates": 0.5}, {})


def test_a_relative_path_in_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="spill: the working directory is gone"):
        Config.resolve({"storage": "spill"}, {})
    assert Config.resolve({"storage": "/spill"}, {}).storage == ("/spill",)
