"""`retrain doctor`: what it checks, what counts, and its exit code, in deliberately broken environments."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from retrain.kernel.config.keys import Table
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.plugins.installed import installed_version
from retrain.kernel.plugins.requirements import required_packages
from retrain.kernel.registry import Plugins
from retrain.tools.doctor.checks import diagnose_reach
from retrain.tools.doctor.diagnosis import diagnose_distribution, diagnose_extra, diagnose_server
from tests.kit.http_handler import Handler, in_a_thread
from tests.kit.inference_server import serving
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long
from tests.kit.toy_policy import ToyModel

Command = Callable[..., Any]
SMALL = '[backend]\ndevices = "cpu"\n[data]\nsource = "arithmetic"\n[model]\nmodel = "builtin:tiny"\n'
TYPO = '[algorithm]\ntransform_mode = "gtpo_spea"\n'
TOYS = Path(__file__).parents[2] / "toys" / "toy_parts.py"
REGISTERS = "from retrain.api import Diagnosis, PluginSpec, hookimpl\n@hookimpl\ndef retrain_"


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a closed port, where the hub is; keys of wandb are hidden and the disk has 100 GB free.

    Tests depend on neither network, user nor disk.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    _set_free_space(monkeypatch, 100 * 10**9)
    return url


def _set_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


@pytest.fixture
def doctor(command: Command, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`doctor(text)`: exit code and findings by name, of a configuration or, with "", of none."""

    def call(text: str = "") -> tuple[int, dict[str, Any]]:
        (tmp_path / "run.toml").write_text(text, encoding="utf-8")
        result = command("doctor", *(["run.toml"] if text else []), "--json")
        content = json.loads(result.out)
        assert content["ok"] == (result.code == 0)
        for check in content["checks"]:
            assert bool(check["fix"]) == (check["status"] != "ok"), check
        return result.code, {check["name"]: check for check in content["checks"]}

    return call


def test_without_a_configuration_everything_is_shown_and_nothing_is_needed(doctor: Any) -> None:
    code, found = doctor()
    assert code == 0
    assert {"python", "disk", "retrain-core", "retrain-core[wandb]", "retrain-tinker", "retrain-prime-rl"} <= set(found)
    assert {"hub", "retrain-sepa[semantic]", "torch", "cpu"} <= set(found)
    assert found["hub"]["status"] == "warn"
    assert not any(check["needed"] for check in found.values())


def test_a_configuration_that_can_run_has_all_it_needs(doctor: Any, command: Command, tmp_path: Path) -> None:
    code, found = doctor(SMALL)
    assert code == 0
    assert {found[name]["status"] for name in ("model", "weights", "device", "run folder", "backend local")} == {"ok"}
    assert found["data source arithmetic"]["detail"].startswith("retrain-rewards ")
    (tmp_path / "run.toml").rename(tmp_path / "retrain.toml")
    assert command("doctor").out.endswith("Everything that retrain.toml needs is here.\n")


def test_a_disk_that_is_nearly_full_is_a_warning(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_free_space(monkeypatch, 10**9)
    code, found = doctor(SMALL)
    assert (code, found["run folder"]["status"]) == (0, "warn")
    assert "1.0 GB" in found["run folder"]["detail"]


def test_a_distribution_that_is_left_out_is_missed(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-sepa")
    code, found = doctor(SMALL)
    fatal = {name for name, check in found.items() if check["needed"] and check["status"] in ("missing", "failed")}
    assert (code, fatal) == (1, {"retrain-sepa", "advantage maxrl", "transform gtpo_sepa", "uncertainty surprisal"})
    assert "RETRAIN_BLOCK" in found["retrain-sepa"]["detail"]
    assert doctor()[0] == 0, "no configuration needs it"


CONDITION = '[campaign]\nseeds = [1]\nconditions = [{advantage_mode = "grpo", transform_mode = "nown"}]\n'


LACKING = [
    (TYPO, "transform gtpo_spea", "run.toml:8 [algorithm] transform_mode"),
    ("[training]\nlrr = 1\n", "configuration", "run.toml:8 [training] lrr"),
    ('[logging]\nlog_dir = "run.toml/inside"\n', "run folder", "run.toml:8 [logging] log_dir"),
    ('[logging]\nlog_dir = "."\n', "run folder", "run.toml:8 [logging] log_dir"),
    ('[logging]\nwandb_project = "p"\n', "wandb key", "api.wandb.ai"),
    ('[reward]\ntype = "judge"\njudge_model = "m"\n', "judge's key", "OPENAI_API_KEY"),
    ('[algorithm]\nadvantage_mode = "not_here.f"\n', "advantage not_here.f", "[algorithm] advantage_mode"),
    (CONDITION, "configuration", "nown"),
]


@pytest.mark.parametrize(("text", "name", "place"), first_or_long(LACKING))
def test_what_the_configuration_needs_and_does_not_have(doctor: Any, text: str, name: str, place: str) -> None:
    code, found = doctor(SMALL + text)
    assert (code, found[name]["needed"]) == (1, True)
    assert place in found[name]["detail"]


@pytest.mark.long
def test_a_wandb_key_is_found_where_wandb_looks(doctor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = SMALL + '[logging]\nwandb_project = "p"\n'
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    code, found = doctor(text)
    assert (code, found["wandb key"]["status"], "0123456789secret" in json.dumps(found)) == (0, "ok", False)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert doctor(text)[1]["wandb key"]["status"] == "ok"
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert doctor(text)[1]["wandb key"]["detail"] == f"for api.wandb.ai, in {tmp_path / 'netrc'}"


@pytest.mark.long
def test_damaged_and_uncached_models(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    text = SMALL.replace("builtin:tiny", str(folder))
    with resources.as_file(resources.files("retrain_local") / "tiny") as tiny:
        for pattern, name in (("config.json", "model"), ("tokenizer*", "model"), ("*.safetensors", "weights")):
            shutil.copytree(tiny, folder)
            assert doctor(text)[0] == 0
            for file in folder.glob(pattern):
                file.unlink()
            code, found = doctor(text)
            assert (code, found[name]["status"]) == (1, "missing")
            shutil.rmtree(folder)
    assert doctor(text)[1]["model"]["status"] == "missing"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    assert doctor(text)[1]["model"]["status"] == "missing"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    code, found = doctor(SMALL.replace("builtin:tiny", "nobody/never-cached-9"))
    assert (code, found["model"]["status"]) == (1, "missing")


def test_servers_are_asked_and_files_of_tasks_looked_for(doctor: Any, closed: str, tmp_path: Path) -> None:
    url = closed.replace("//", "//me:hunter22@")
    text = f'[reward]\ntype = "judge"\njudge_model = "m"\njudge_base_url = "{url}/v1"\n'
    code, found = doctor(SMALL + text)
    assert (code, found["judge"]["status"], found["judge's key"]["status"]) == (1, "failed", "warn")
    assert "hunter22" not in json.dumps(found)
    text = SMALL.replace('source = "arithmetic"', 'source = "files"\npath = "tasks.jsonl"')
    assert "tasks.jsonl" in doctor(text)[1]["data"]["detail"]
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    assert doctor(text)[0] == 0


LICENCE = (
    'diagnose(config):\n    return [Diagnosis(name="licence", status="missing", fix="renew", needed=bool(config))]\n'
)
SECOND = 'register_advantages(register):\n    register(PluginSpec(name="grpo", summary="Mine.", factory=len))\n'
GRPO = '[algorithm]\nadvantage_mode = "grpo"\n'


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "name", "text", "codes"),
    [
        (f"{REGISTERS}{LICENCE}", "licence", "", (0, 1)),  # exit codes without a configuration, and with one
        (f'{REGISTERS}diagnose(config):\n    raise KeyError("oops")\n', "plugin strangers:strange_doctor", "", (0, 0)),
        ("raise OSError('libfoo.so')\n", "plugin strangers 1.0", "", (1, 0)),
        (f"{REGISTERS}{SECOND}", "advantage grpo", "", (0, 0)),
        (f"{REGISTERS}{SECOND}", "advantage grpo", GRPO, (0, 1)),
    ],
    ids=["a-finding", "a-diagnosis-that-raises", "not-loaded", "two-owners", "two-owners-of-a-part-in-use"],
)
def test_a_plugin_adds_findings_and_its_faults_are_findings(
    doctor: Any, distribution: Callable[..., Path], source: str, name: str, text: str, codes: tuple[int, int]
) -> None:
    distribution("strangers", {"strange_doctor": source})
    without, (code, found) = doctor(), doctor(SMALL + text)
    assert (without[0], code) == codes
    assert found[name]["status"] != "ok"


def test_people_read_a_line_each_with_the_fix_below(command: Command, tmp_path: Path) -> None:
    for text in ("", "[training\n"):
        if text:
            (tmp_path / "run.toml").write_text(text)
        result = command("doctor", "run.toml")
        assert (result.code, result.out, "fix: " in result.err) == (2, "", True)
    (tmp_path / "run.toml").write_text(SMALL + TYPO)
    lines = command("doctor", "run.toml").out.splitlines()
    (number,) = (i for i, line in enumerate(lines) if "transform gtpo_spea" in line)
    assert (lines[number][:27], lines[number + 1].strip()) == ("missing transform gtpo_spea", "fix: use 'gtpo_sepa'")
    assert lines[-1] == "1 thing that run.toml needs is missing or broken."


def test_logprobs_of_sampler_and_trainer_agree_to_the_limit(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    monkeypatch.setattr("retrain.tools.doctor.command.MAX_MEAN_GAP", 0.0)
    result = command("doctor", "run.toml", "--logprobs", "--json")
    found = json.loads(result.out)["logprobs"]
    assert (result.code, found["prompts"], found["tokens"] >= 8) == (1, 8, True)
    assert 0.0 < found["mean"] <= found["max"] < 1e-4
    assert codes_in(command("doctor", "--logprobs").err) == ["doctor.no-configuration"]
    (tmp_path / "run.toml").write_text(SMALL + TYPO)
    result = command("doctor", "run.toml", "--logprobs")
    assert (result.code, "were not compared" in result.out) == (1, True)


TOY = '[backend]\nbackend = "toy"\n[data]\nsource = "toy"\n[reward]\ntype = "toy"\n[model]\nmodel = "./model"\n'
REPORTS = """
def _reported(self, rows, temperature):
    logp_V = self._log_softmax(temperature)
    return [np.where(row.action_T, logp_V[row.tokens_T] + {error}, 0.0) for row in rows]

ToyBackend.logprobs = _reported
"""
RECOMPUTES = """
_sample = ToyBackend.sample
def _recomputed(self, *arguments):
    return [[replace(s, engine_logprobs_T={engine}) for s in group] for group in _sample(self, *arguments)]

ToyBackend.sample = _recomputed
"""


OFF = [
    ("-0.07", "", 1, "mean gap 0.07, max "),
    ("0.04", "", 0, "mean gap 0.04, max "),
    # Recomputed log-probabilities come from the trainer: the engine's, next to them, are compared.
    ("0.0", "s.logprobs_T - 0.3", 1, "mean gap 0.3, max "),
    ("0.0", "s.logprobs_T + 0.01", 0, "mean gap 0.01, max "),
    ("", "", 1, "doctor.logprobs-unreported"),
    ("0.0", "None", 1, "doctor.engine-logprobs"),
    ("np.nan", "", 1, "doctor.logprobs-not-finite"),
    ("np.inf", "", 1, "doctor.logprobs-not-finite"),
]


@pytest.mark.parametrize("case", OFF)
def test_a_trainer_that_is_off_is_found_and_never_by_numbers_that_agree_with_themselves(
    command: Command, tmp_path: Path, tokenizer_folder: Path, distribution: Command, case: tuple[str, str, int, str]
) -> None:
    error, engine, code, gap = case
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "run.toml").write_text(TOY)
    source = TOYS.read_text(encoding="utf-8") + (REPORTS.format(error=error) if error else "")
    distribution("retrain-toys", {"toy_parts": source + (RECOMPUTES.format(engine=engine) if engine else "")})
    choice = ("--inference-engine", "vllm", "--inference-logprobs", "trainer") if engine else ()
    result = command("doctor", "run.toml", "--logprobs", *choice)
    assert result.code == code
    assert gap in result.out or codes_in(result.err) == [gap]


class Served(Table):
    """Any table with the key of a server."""

    url: str = ""


def test_servers_of_engine_and_backend_are_asked_and_one_of_a_fleet_is_enough(plugins: Plugins, closed: str) -> None:
    tables = {
        "inference": Served(url=closed),
        "model": ModelTable.model_construct(model="builtin:tiny", base_url=closed),
    }
    found = {finding.name: finding for finding in diagnose_reach(Config(tables=tables), plugins)}
    assert [found[name].is_fatal for name in ("inference server", "training service", "model")] == [True, True, False]
    with serving(ToyModel()) as server:
        tables = {"inference": Served(url=f"{server.url}, {closed}"), "model": ModelTable(model="builtin:tiny")}
        fleet = [each for each in diagnose_reach(Config(tables=tables), plugins) if each.name == "inference server"]
    assert [(each.status, each.detail.split()[0]) for each in fleet] == [("ok", server.url), ("warn", closed)]


def test_a_file_that_trains_nothing_needs_no_training_parts(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local,retrain-sepa,retrain-rewards")
    code, found = doctor('[squeeze]\nadapter_path = "adapters/final"\n')
    assert not any(name.startswith(("backend ", "model", "transform ")) for name in found)
    assert not any(check["needed"] for name, check in found.items() if name.startswith("retrain-"))
    assert (code, "adapters/final" in found["configuration"]["detail"]) == (1, True)


def test_a_table_that_cannot_be_imported_is_one_finding(doctor: Any, distribution: Callable[..., Path]) -> None:
    spec = 'PluginSpec(name="odd", summary="s", factory="there_is_none:Table")'
    source = f"{REGISTERS}register_config_tables(register):\n    register({spec})\n"
    distribution("odd-table", {"odd_table": source})
    found = doctor(SMALL)[1]["plugin odd-table 1.0"]
    assert found["detail"].startswith("odd_table: table [odd]: ModuleNotFoundError")


REQUIRES = """\
Requires-Dist: numpy>=1
Requires-Dist: pydantic>=900
Requires-Dist: no-such-package
Requires-Dist: only-elsewhere; sys_platform == "no-such-platform"
Requires-Dist: numpy>=1; extra == "small"
Requires-Dist: no-such-extra-package; extra == "big"
Requires-Dist: not a requirement at all !!
Provides-Extra: small
Provides-Extra: big
"""


@pytest.fixture
def hungry(distribution: Callable[..., Path]) -> None:
    """An installed distribution with requirements of every kind."""
    site = distribution("hungry", {"hungry": ""})
    with (site / "hungry-1.0.dist-info" / "METADATA").open("a", encoding="utf-8") as metadata:
        metadata.write(REQUIRES)


@pytest.mark.usefixtures("hungry")
def test_requirements_of_others_and_metadata_without_modules_do_not_count(distribution: Callable[..., Path]) -> None:
    always = {package.name: package.is_met for package in required_packages("hungry")}
    assert always == {"numpy": True, "pydantic": False, "no-such-package": False}
    assert [package.name for package in required_packages("hungry", "big")] == ["no-such-extra-package"]
    assert required_packages("there-is-no-such-distribution") == ()
    site = distribution("hollow-one", {"hollow_one": ""})
    assert installed_version("hollow-one") == "1.0"
    (site / "hollow_one.py").unlink()
    (site / "hollow_one-1.0.dist-info" / "top_level.txt").write_text("hollow_one\n")
    assert installed_version("hollow-one") == ""


@pytest.mark.usefixtures("hungry")
def test_a_distribution_and_its_extras_are_whole_when_all_that_they_require_is_there() -> None:
    for extra, status, fix in (
        ("small", "ok", ""),
        ("big", "missing", "pip install 'hungry[big]'"),
        ("none", "missing", "pip install --upgrade 'hungry[none]'"),
    ):
        found = diagnose_extra("hungry", extra, purpose="the test", needed=True)
        assert (found.name, found.status, found.fix) == (f"hungry[{extra}]", status, fix)
        assert found.is_fatal == (status != "ok")
    found = diagnose_distribution("hungry", purpose="the test", needed=True)
    assert found.status == "failed"
    assert [part for part in ("no-such-package", "(wants >=900)") if part not in found.detail] == []
    missing = diagnose_distribution("no-such-distribution", purpose="the test", needed=False)
    assert (missing.status, missing.fix, missing.is_fatal) == ("missing", "pip install no-such-distribution", False)


class Answering(Handler):
    """Answers `/CODE` with that status."""

    def do_GET(self) -> None:
        self.reply({}, int(self.path[1:4]))


def test_any_answer_but_a_server_error_will_do_and_no_login_is_shown() -> None:
    with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Answering)) as port:
        for code, status in {200: "ok", 401: "ok", 404: "ok", 501: "ok", 500: "failed", 503: "failed"}.items():
            url = f"http://me:hunter22@127.0.0.1:{port}/{code}?api_key=hunter22"
            found = diagnose_server("s", url, needed=True)
            assert (found.status, "hunter22" in repr(found)) == (status, False)


def test_what_is_no_url_a_server_that_is_not_there_and_one_that_talks_no_http_fail() -> None:
    for url in ("localhost:8000", "ftp://x/", "http://", "", "http://[::1", "http://127.0.0.1:99999999"):
        found = diagnose_server("s", url, needed=True)
        assert (found.status, found.is_fatal, bool(found.fix)) == ("failed", True, True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "does not answer: " in diagnose_server("s", f"http://127.0.0.1:{port}", needed=True).detail
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        Thread(target=answer, daemon=True).start()
        found = diagnose_server("s", f"http://127.0.0.1:{listener.getsockname()[1]}", needed=True)
    assert found.status == "failed"
    for status, fatal in (("ok", False), ("warn", False), ("missing", True), ("failed", True)):
        made = [Diagnosis(name="x", status=status, needed=needed) for needed in (True, False)]  # type: ignore[arg-type]
        assert [each.is_fatal for each in made] == [fatal, False], "only what is needed and not there"
