"""What is installed decides what works: packages deleted, distributions missing, strangers' plugins broken."""

from __future__ import annotations

import email.message
import email.parser
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT
from tests.kit.shared import first_or_long

PACKAGE = ROOT / "retrain-core/src/retrain"
# Without these there is no run: the command line, its console, the metrics it prints, prompts, scores, credit.
NEEDED = {"cli", "observe/console", "observe/metrics", "run", "tasks", "credit"}
PLUGINS = (file.parent for file in PACKAGE.rglob("__init__.py") if "@hookimpl" in file.read_text(encoding="utf-8"))
OPTIONAL = tuple(
    folder
    for folder in ("tools", *sorted(str(folder.relative_to(PACKAGE)) for folder in PLUGINS))
    if folder not in NEEDED
)
SMALL = '[backend]\ndevices = "cpu"\n[data]\nsource = "arithmetic"\n[model]\nmodel = "builtin:tiny"\n'
SHORT = ("--max-steps", "2", "--batch-size", "2", "--group-size", "4", "--eval-examples", "0")
HEAVY = ("torch", "transformers", "datasets", "peft", "reasoning_gym", "math_verify", "tinker", "zmq")
GOOD_PLUGIN = """
from retrain.api import PluginSpec, hookimpl

def centred(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]

@hookimpl
def retrain_register_advantages(register):
    register(PluginSpec(name="centred", summary="Reward minus the mean of its group.", factory=centred))
"""
BROKEN_PLUGIN = "raise ImportError('libquantum.so.3: cannot open shared object file')\n"
MISSPELT_HOOK = GOOD_PLUGIN.replace("retrain_register_advantages", "retrain_register_advantage")
SECOND_GRPO = GOOD_PLUGIN.replace('"centred"', '"grpo"')


def names(content: dict, kind: str) -> set[str]:
    return {row["name"] for row in content["kinds"][kind]}


def distributions(content: dict) -> set[str]:
    return {row["distribution"] for rows in content["kinds"].values() for row in rows}


def inventory(installation, work: Path, **environ: str) -> dict:
    result = installation.retrain("plugins", "--json", folder=work, **environ)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def metadata_of(wheel: Path) -> tuple[set[str], email.message.Message]:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (metadata,) = (file for file in files if file.endswith(".dist-info/METADATA"))
        return files, email.parser.Parser().parsestr(archive.read(metadata).decode())


# ---------------------------------------------------------------- the wheels


def test_every_wheel_holds_its_types_licence_and_one_version(wheels):
    versions = set()
    for name, wheel in wheels.items():
        files, metadata = metadata_of(wheel)
        package = "retrain" if name == "retrain-core" else name.replace("-", "_")
        assert f"{package}/py.typed" in files
        assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)
        assert {Path(file).parts[0].partition("-")[0] for file in files} == {package, name.replace("-", "_")}
        assert metadata["Name"] == name
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Requires-Python"] == ">=3.11"
        assert metadata.get_payload().strip(), f"{name} has an empty README"
        versions.add(metadata["Version"])
    assert len(versions) == 1


def test_our_distributions_require_each_other_at_exactly_their_own_version(wheels):
    for wheel in wheels.values():
        _, metadata = metadata_of(wheel)
        for requirement in metadata.get_all("Requires-Dist") or ():
            if requirement.startswith("retrain-"):
                assert requirement.endswith(f"=={metadata['Version']}"), requirement


def test_the_kernel_requires_no_training_library(wheels):
    _, metadata = metadata_of(wheels["retrain-core"])
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("torch", "peft", "datasets", "tinker", "verifiers"))]


# ---------------------------------------------------------------- nothing heavy before it is needed


@pytest.mark.parametrize("arguments", first_or_long([["--help"], ["plugins"], ["init", "--list"], ["explain"]]))
def test_commands_that_do_not_train_import_nothing_heavy(installation, work, toml, arguments):
    toml(SMALL)
    code = (
        "import sys\nfrom retrain.cli.command_line import run\n"
        f"assert run({arguments!r}) == 0\n"
        f"sys.exit(str(sorted(set({HEAVY!r}) & set(sys.modules)) or ''))"
    )
    result = installation.python("-c", code, folder=work)
    assert result.stderr.strip() == ""


def test_importing_the_public_modules_imports_nothing_heavy(installation, work):
    code = f"import sys, retrain.api, retrain.advantages; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert installation.python("-c", code, folder=work).stdout.strip() == "[]"


# ---------------------------------------------------------------- packages deleted


EACH_AWAY = """
import contextlib, importlib, io, json, sys, traceback
from pathlib import Path

def command(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        from retrain.cli.command_line import run
        code = run(list(words))
    return code, out.getvalue(), err.getvalue()

def seen():
    for name in [name for name in sys.modules if name.partition("_")[0].partition(".")[0] == "retrain"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        return command("plugins", "--json"), command("explain", "retrain.toml", "--json")
    except BaseException:
        return traceback.format_exc()

package, found = Path(sys.argv[1]), {"": seen()}
for name in sys.argv[2:]:
    (package / name).rename(package.parent / "away")
    found[name] = seen()
    (package.parent / "away").rename(package / name)
json.dump(found, sys.stdout)
"""


def fault_of(seen: str | list[list]) -> str:
    """Nothing where both commands ended well; else the traceback, or what the first that did not had to say."""
    return seen if isinstance(seen, str) else next((err for code, _, err in seen if code), "")


def check_rest_works(before: dict, after: dict, explained: dict, folders: tuple[str, ...]) -> None:
    """What the deleted packages registered is gone and named, all else is there, and a run would be what it was."""
    deleted = tuple(f"retrain.{folder.replace('/', '.')}." for folder in folders)
    for kind, rows in before["kinds"].items():
        kept = {row["name"] for row in rows if not f"{row['source']}.".startswith(deleted)}
        assert names(after, kind) == kept, (folders, kind)
    sources = {row["source"] for rows in before["kinds"].values() for row in rows}
    assert {failure["source"] for failure in after["failures"]} >= {s for s in sources if f"{s}.".startswith(deleted)}
    assert all(f"{failure['source']}.".startswith(deleted) for failure in after["failures"]), folders
    assert explained["condition"] == "maxrl+gtpo_sepa"


@pytest.mark.long
def test_the_rest_works_when_any_package_is_deleted(installation, work, toml):
    toml(SMALL)
    done = installation.python("-c", EACH_AWAY, str(installation.ours / "retrain"), *OPTIONAL, folder=work)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    broken = [f"without {folder}: {fault}" for folder, seen in found.items() if (fault := fault_of(seen))]
    assert not broken, "\n".join(broken)
    plugged = {folder: json.loads(plugins[1]) for folder, (plugins, _) in found.items()}
    for folder in OPTIONAL:
        check_rest_works(plugged[""], plugged[folder], json.loads(found[folder][1][1]), (folder,))


def test_the_table_of_a_deleted_package_is_refused_by_name(installation, work, toml):
    shutil.rmtree(installation.ours / "retrain/campaign")
    result = installation.retrain("explain", toml(SMALL + "[campaign]\nmax_workers = 2\n"), folder=work)
    assert result.returncode == 2
    assert "campaign" in result.stderr


@pytest.mark.long
def test_training_works_with_every_optional_package_deleted(installation, work, toml):
    before = inventory(installation, work)
    for folder in OPTIONAL:
        shutil.rmtree(installation.ours / "retrain" / folder, ignore_errors=True)  # inside one that is gone
    after = inventory(installation, work)
    explained = installation.retrain("explain", toml(SMALL), "--json", folder=work)
    assert explained.returncode == 0, explained.stderr
    check_rest_works(before, after, json.loads(explained.stdout), OPTIONAL)
    template = "from retrain_local.templates import TINY; open('retrain.toml', 'w').write(TINY)"  # `init` is gone
    assert installation.python("-c", template, folder=work).returncode == 0
    result = installation.retrain(*SHORT, folder=work)
    assert result.returncode == 0, result.stderr
    lines = next(work.rglob("metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [0, 1]


# ---------------------------------------------------------------- distributions missing


@pytest.mark.parametrize(
    ("algorithm", "key", "wanted"),
    first_or_long(
        [
            ('[algorithm]\nadvantage_mode = "grpo"\n', "retrain.toml:8 [algorithm] advantage_mode", "grpo"),
            ('[algorithm]\ntransform_mode = "gtpo_sepa"\n', "retrain.toml:8 [algorithm] transform_mode", "gtpo_sepa"),
            ("", "advantage_mode", "maxrl"),
        ]
    ),
    ids=["grpo", "gtpo_sepa", "default"],
)
def test_without_retrain_sepa_its_names_are_answered_with_the_install_line(
    installation, work, toml, algorithm, key, wanted
):
    installation.uninstall("retrain-sepa")
    installation.add("strangers-plugin", "strangers_plugin", GOOD_PLUGIN)
    result = installation.retrain("explain", toml(SMALL + algorithm), folder=work)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert key in result.stderr
    assert f"named '{wanted}'" in result.stderr
    assert "known advantage names: centred (strangers-plugin 1.2)" in result.stderr
    assert "fix: pip install retrain-sepa\n" in result.stderr


def test_the_kernel_alone_starts_and_says_what_is_missing(installation, work, toml):
    for name in ("retrain-sepa", "retrain-rewards", "retrain-local", "retrain-tinker", "retrain-prime-rl"):
        installation.uninstall(name)
    assert distributions(inventory(installation, work)) == {"retrain-core"}
    result = installation.retrain("explain", toml(SMALL), folder=work)
    assert result.returncode == 2
    for name in ("retrain-sepa", "retrain-rewards", "retrain-local"):
        assert f"pip install {name}" in result.stderr


# ---------------------------------------------------------------- strangers' plugins


def test_a_strangers_advantage_is_found_through_its_entry_point(installation, work, toml):
    installation.add("strangers-plugin", "strangers_plugin", GOOD_PLUGIN)
    result = installation.retrain("explain", toml(SMALL), "--advantage-mode", "centred", folder=work)
    assert result.returncode == 0, result.stderr
    assert "centred+gtpo_sepa" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "error"),
    [
        (BROKEN_PLUGIN, "ImportError: libquantum.so.3: cannot open shared object file"),
        pytest.param("def broken(:\n", "SyntaxError", marks=pytest.mark.slow),
        pytest.param(MISSPELT_HOOK, "did you mean retrain_register_advantages?", marks=pytest.mark.slow),
        pytest.param(GOOD_PLUGIN.replace("@hookimpl\n", ""), "lacks the @hookimpl decorator", marks=pytest.mark.slow),
        pytest.param(
            GOOD_PLUGIN.replace("register(PluginSpec(", "register(dict("),
            "takes a PluginSpec, not dict",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["import", "syntax", "misspelt-hook", "no-decorator", "no-spec"],
)
def test_a_faulty_plugin_harms_nothing_and_its_error_is_shown(installation, work, toml, source, error):
    before = inventory(installation, work)
    installation.add("strangers-plugin", "strangers_plugin", source)
    content = inventory(installation, work)
    assert content["kinds"] == before["kinds"]
    (failure,) = content["failures"]
    assert failure["distribution"] == "strangers-plugin 1.2"
    assert error in failure["error"]
    assert error in installation.retrain("plugins", folder=work).stdout

    assert installation.retrain("explain", toml(SMALL), folder=work).returncode == 0
    missing = installation.retrain("explain", "--advantage-mode", "centred", folder=work)
    assert missing.returncode == 2
    assert "strangers-plugin 1.2" in missing.stderr
    assert error in missing.stderr


@pytest.mark.long
def test_two_owners_of_one_name_are_an_error_that_names_both(installation, work, toml):
    installation.add("strangers-plugin", "strangers_plugin", SECOND_GRPO)
    clashing = [row for row in inventory(installation, work)["kinds"]["advantage"] if row["clash"]]
    assert {row["distribution"] for row in clashing} == {"retrain-sepa", "strangers-plugin"}
    toml(SMALL)
    assert installation.retrain("explain", folder=work).returncode == 0, "nobody asked for grpo"
    result = installation.retrain("explain", "--advantage-mode", "grpo", folder=work)
    assert result.returncode == 2
    assert "retrain-sepa" in result.stderr
    assert "strangers-plugin 1.2" in result.stderr
    mended = installation.retrain("explain", "--advantage-mode", "grpo", folder=work, RETRAIN_BLOCK="strangers-plugin")
    assert mended.returncode == 0


# ---------------------------------------------------------------- choosing plugins by environment


def test_retrain_plugins_loads_only_the_named_distributions_and_the_kernel(installation, work):
    installation.add("strangers-plugin", "strangers_plugin", BROKEN_PLUGIN)
    content = inventory(installation, work, RETRAIN_PLUGINS="retrain-sepa, retrain-rewards")
    assert distributions(content) == {"retrain-core", "retrain-sepa", "retrain-rewards"}
    assert content["failures"] == []


@pytest.mark.long
def test_retrain_block_leaves_distributions_out(installation, work):
    installation.add("strangers-plugin", "strangers_plugin", BROKEN_PLUGIN)
    content = inventory(
        installation, work, RETRAIN_BLOCK="strangers-plugin,retrain-local,retrain-tinker,retrain-prime-rl"
    )
    assert distributions(content) == {"retrain-core", "retrain-sepa", "retrain-rewards"}
    assert content["failures"] == []
    assert "retrain-core" in distributions(inventory(installation, work, RETRAIN_BLOCK="retrain-core"))
