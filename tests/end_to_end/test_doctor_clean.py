"""`doctor` and `plugins` where something is really not installed, and where their room is deleted."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.kit.shared import first_or_long, slow_or_long

SMALL = '[backend]\ndevices = "cpu"\n[data]\nsource = "arithmetic"\n[model]\nmodel = "builtin:tiny"\n'
HEAVY = ("torch", "transformers", "datasets", "peft", "reasoning_gym", "math_verify")


def fatal(content: dict) -> dict[str, str]:
    checks = [check for check in content["checks"] if check["needed"] and check["status"] in ("missing", "failed")]
    return {check["name"]: check["fix"] for check in checks}


@pytest.mark.long
def test_the_doctor_finds_nothing_missing_where_all_is_installed(installation, work, toml):
    toml(SMALL)
    whole = installation.retrain("doctor", "--json", folder=work, HF_HUB_OFFLINE="1")
    assert (whole.returncode, fatal(json.loads(whole.stdout))) == (0, {})


MISSING = [
    ("retrain-local", "backend local"),
    ("retrain-rewards", "data source arithmetic"),
    ("retrain-sepa", "transform gtpo_sepa"),
]


@pytest.mark.parametrize(("distribution", "part"), slow_or_long(MISSING, MISSING[-1]))
@pytest.mark.slow
def test_the_doctor_names_the_install_line_of_what_is_missing(installation, work, toml, distribution, part):
    toml(SMALL)
    installation.uninstall(distribution)
    result = installation.retrain("doctor", "--json", folder=work, HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    found = fatal(json.loads(result.stdout))
    assert found[distribution] == f"pip install {distribution}"
    assert f"pip install {distribution}" in found[part]


@pytest.mark.long
def test_backends_tell_what_is_not_installed(installation, work):
    installation.uninstall("retrain-local")
    content = json.loads(installation.retrain("plugins", "--kind", "backend", "--json", folder=work).stdout)
    assert "local" not in {row["name"] for row in content["backends"]}
    hints = {row["name"]: row["hint"] for row in content["promised"]}
    assert hints["local"] == "pip install retrain-local"


@pytest.mark.long
def test_the_other_commands_work_without_the_doctors_room(installation, work, toml):
    shutil.rmtree(installation.ours / "retrain/tools/doctor")
    assert installation.retrain("explain", toml(SMALL), folder=work).returncode == 0
    listed = json.loads(installation.retrain("plugins", "--json", folder=work).stdout)
    assert [failure["source"] for failure in listed["failures"]] == ["retrain.tools.doctor"]
    assert installation.retrain("plugins", "--kind", "backend", folder=work).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    first_or_long([["plugins", "retrain.toml"], ["plugins", "--kind", "backend"], ["migrate-config", "retrain.toml"]]),
)
def test_these_commands_import_nothing_heavy(installation, work, toml, arguments):
    toml(SMALL)
    code = (
        "import sys\nfrom retrain.cli.command_line import run\n"
        f"assert run({arguments!r}) == 0\n"
        f"sys.exit(str(sorted(set({HEAVY!r}) & set(sys.modules)) or ''))"
    )
    result = installation.python("-c", code, folder=work)
    assert result.stderr.strip() == ""
