"""What is installed decides what works: packages deleted, distributions missing, a plugin upgraded and removed."""

from __future__ import annotations

import email.parser
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, Installation
from tests.end_to_end.running import records, retrain
from tests.kit.shared import first_or_long, slow_or_long

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
HEAVY = ("torch", "peft", "datasets", "tinker", "verifiers")
SLOW = {
    "transformers": "tokenizer and model of a plain folder are ours",
    "peft": "so is the adapter",
    "torch._dynamo": "the optimizer is ours: that of torch imports a compiler",
    "torch._inductor": "no compiler",
    "sympy": "only a compiler needs it",
    "datasets": "the arithmetic source makes its rows",
    "huggingface_hub": "nothing is fetched",
    "numpy.ma": "np.percentile and np.unique import it",
    "packaging.requirements": "only doctor and backends ask what is required",
    "scipy": "no statistics in a run",
    "pandas": "no tables in a run",
}
DUMP = (
    "import atexit, json, sys\n"
    "atexit.register(lambda: json.dump(sorted(sys.modules), open('modules.json', 'w')))\n"
    "from retrain.cli.command_line import main\nmain(sys.argv[1:])\n"
)


def names(content: dict, kind: str) -> set[str]:
    return {row["name"] for row in content["kinds"][kind]}


def inventory(installation, work: Path) -> dict:
    result = installation.retrain("plugins", "--json", folder=work)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_wheels_hold_their_types_licence_and_one_version_and_require_each_other_at_it(wheels):
    versions = set()
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            files = set(archive.namelist())
            (file,) = (file for file in files if file.endswith(".dist-info/METADATA"))
            metadata = email.parser.Parser().parsestr(archive.read(file).decode())
        package = "retrain" if name == "retrain-core" else name.replace("-", "_")
        assert f"{package}/py.typed" in files
        assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)
        assert {Path(file).parts[0].partition("-")[0] for file in files} == {package, name.replace("-", "_")}
        wanted = {"Name": name, "License-Expression": "Apache-2.0", "Requires-Python": ">=3.11"}
        assert {field: metadata[field] for field in wanted} == wanted
        assert metadata.get_payload().strip(), f"{name} has an empty README"
        versions.add(metadata["Version"])
        required = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
        assert all(line.endswith(f"=={metadata['Version']}") for line in required if line.startswith("retrain-"))
        if name == "retrain-core":
            assert not [line for line in required if line.startswith(HEAVY)]
    assert len(versions) == 1


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


@pytest.mark.long
def test_training_works_with_every_optional_package_deleted(installation, work, toml):
    before = inventory(installation, work)
    for folder in OPTIONAL:
        shutil.rmtree(installation.ours / "retrain" / folder, ignore_errors=True)  # inside one that is gone
    after = inventory(installation, work)
    explained = installation.retrain("explain", toml(SMALL), "--json", folder=work)
    assert explained.returncode == 0, explained.stderr
    check_rest_works(before, after, json.loads(explained.stdout), OPTIONAL)
    template = "from retrain_local.templates import TINY; open('retrain.toml', 'w').write(TINY())"  # `init` is gone
    assert installation.python("-c", template, folder=work).returncode == 0
    result = installation.retrain(*SHORT, folder=work)
    assert result.returncode == 0, result.stderr
    lines = next(work.rglob("metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [0, 1]


@pytest.mark.parametrize(
    ("algorithm", "key", "wanted"),
    first_or_long(
        [
            ('[algorithm]\nadvantage_mode = "grpo"\n', "retrain.toml:8 [algorithm] advantage_mode", "grpo"),
            ("", "advantage_mode", "maxrl"),
        ]
    ),
    ids=["grpo", "default"],
)
def test_without_retrain_sepa_its_names_are_answered_with_the_install_line(
    installation, work, toml, algorithm, key, wanted
):
    installation.uninstall("retrain-sepa")
    result = installation.retrain("explain", toml(SMALL + algorithm), folder=work)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    for part in (key, f"named '{wanted}'", "known advantage names: ", "fix: pip install retrain-sepa\n"):
        assert part in result.stderr


def test_the_kernel_alone_starts_and_says_what_is_missing(installation, work, toml):
    for name in ("retrain-sepa", "retrain-rewards", "retrain-local", "retrain-tinker", "retrain-prime-rl"):
        installation.uninstall(name)
    rows = [row for rows in inventory(installation, work)["kinds"].values() for row in rows]
    assert {row["distribution"] for row in rows} == {"retrain-core"}
    result = installation.retrain("explain", toml(SMALL), folder=work)
    assert result.returncode == 2
    for name in ("retrain-sepa", "retrain-rewards", "retrain-local"):
        assert f"pip install {name}" in result.stderr


MISSING = [
    ("", ""),
    ("retrain-local", "backend local"),
    ("retrain-rewards", "data source arithmetic"),
    ("retrain-sepa", "transform gtpo_sepa"),
]


@pytest.mark.parametrize(("distribution", "part"), slow_or_long(MISSING, MISSING[-1]))
@pytest.mark.slow
def test_the_doctor_names_the_install_line_of_what_is_missing(installation, work, toml, distribution, part):
    toml(SMALL)
    if distribution:
        installation.uninstall(distribution)
    result = installation.retrain("doctor", "--json", folder=work, HF_HUB_OFFLINE="1")
    assert result.returncode == bool(distribution)
    checks = [each for each in json.loads(result.stdout)["checks"] if each["needed"]]
    found = {each["name"]: each["fix"] for each in checks if each["status"] in ("missing", "failed")}
    if distribution:
        assert found[distribution] == f"pip install {distribution}"
        assert f"pip install {distribution}" in found[part]
    else:
        assert found == {}


@pytest.mark.long
def test_a_plain_run_imports_nothing_slow(work):
    """Each of these once cost it a tenth of a second, or seconds."""
    assert retrain("init", "--template", "tiny", cwd=work).code == 0
    command = [sys.executable, "-c", DUMP, "-q", *SHORT]
    done = subprocess.run(command, cwd=work, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads((work / "modules.json").read_text(encoding="utf-8")))
    assert "torch" in imported
    assert {name: why for name, why in SLOW.items() if name in imported} == {}


THREE = (
    *("--lora-rank", "4", "--seed", "1", "--max-steps", "3", "--batch-size", "2", "--group-size", "4"),
    *("--max-tokens", "24", "--lr", "0.003", "--temperature", "1.0", "--save-every", "0"),
)


class Stranger:
    """Somebody with a plugin distribution called my-floor, made by the installed wheel."""

    def __init__(self, installation: Installation, work: Path) -> None:
        self.installation, self.work, self.project = installation, work, work / "my-floor"
        made = installation.retrain(
            "init-plugin", "--distribution", "--name", "my-floor", "--kind", "transform", "--no-input", folder=work
        )
        assert made.returncode == 0, made.stderr

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.project / file
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def install(self) -> None:
        """Build the wheel, and put it in the place of what was installed before."""
        folder = self.project / "dist"
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=self.project, check=True, capture_output=True, timeout=60)
        if (self.installation.ours / "my_floor").exists():
            self.installation.uninstall("my-floor")
        with zipfile.ZipFile(max(folder.glob("*.whl"))) as wheel:
            wheel.extractall(self.installation.ours)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.installation.retrain(*arguments, folder=self.work)

    def inventory(self) -> dict[str, list[dict[str, str]]]:
        content = json.loads(self.run("plugins", "--json").stdout)
        return {"transforms": content["kinds"]["transform"], "failures": content["failures"]}


@pytest.fixture
def stranger(installation: Installation, work: Path) -> Stranger:
    return Stranger(installation, work)


def configured(toml: Callable[[str], str], name: str, params: str = "") -> None:
    toml(f'{SMALL}[algorithm]\ntransform_mode = "{name}"\n[algorithm.transform_params]\n{params}\n')


@pytest.mark.slow
def test_installed_trained_with_upgraded_and_uninstalled(stranger: Stranger, toml: Callable[[str], str]) -> None:
    stranger.install()
    rows = {row["name"]: row for row in stranger.inventory()["transforms"]}
    assert (rows["my_floor"]["distribution"], rows["my_floor"]["version"]) == ("my-floor", "0.1.0")

    configured(toml, "my_floor", "floor = 1.0")
    done = stranger.run(*THREE, "--log-dir", "logs/first")
    assert done.returncode == 0, done.stderr
    lines = records(stranger.work / "logs/first/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {line["condition"] for line in lines} == {"maxrl+my_floor"}
    assert all(line["floor_lifted_frac"] > 0.2 for line in lines if line.get("loss"))
    assert '"my-floor": "0.1.0"' in (stranger.work / "logs/first/run.json").read_text(encoding="utf-8")

    stranger.edit("pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"')
    stranger.edit("src/my_floor/transform.py", "    floor: float =", "    lowest_share: float =")
    stranger.edit("src/my_floor/transform.py", "(ctx.params).floor", "(ctx.params).lowest_share")
    stranger.install()
    assert {row["version"] for row in stranger.inventory()["transforms"] if row["name"] == "my_floor"} == {"0.2.0"}
    refused = stranger.run("explain")
    assert refused.returncode == 2
    assert "unknown option 'floor'" in refused.stderr
    assert "known: lowest_share" in refused.stderr
    configured(toml, "my_floor", "lowest_share = 0.0")
    done = stranger.run(*THREE, "--log-dir", "logs/second")
    assert done.returncode == 0, done.stderr
    assert '"my-floor": "0.2.0"' in (stranger.work / "logs/second/run.json").read_text(encoding="utf-8")

    stranger.installation.uninstall("my-floor")
    missing = stranger.run()
    assert missing.returncode == 2
    assert "retrain.toml:8 [algorithm] transform_mode: no transform named 'my_floor'" in missing.stderr
    assert "known transform names: gtpo (retrain-sepa 0.1.0)" in missing.stderr
    assert "Traceback" not in missing.stderr
