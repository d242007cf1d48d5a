"""`retrain doctor`: what it checks, what counts, and its exit code, in deliberately broken environments."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.config.keys import Table
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable
from retrain.kernel.registry import Plugins
from retrain.tools.doctor.checks import diagnose_reach
from tests.kit.inference_server import serving
from tests.kit.shared import first_or_long
from tests.kit.toy_policy import ToyModel

Command = Callable[..., Any]
SMALL = '[backend]\ndevices = "cpu"\n[data]\nsource = "arithmetic"\n[model]\nmodel = "builtin:tiny"\n'
TOYS = Path(__file__).parents[2] / "toys" / "toy_parts.py"
DIAGNOSIS = """
from retrain.api import Diagnosis, hookimpl

@hookimpl
def retrain_diagnose(config):
    {body}
"""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub at a closed port and hide wandb keys, so that tests depend on neither network nor user."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{probe.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture
def doctor(command: Command, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`doctor(text, *arguments)`: exit code and findings by name, of a configuration or, with "", of none."""

    def call(text: str = "", *arguments: str) -> tuple[int, dict[str, Any]]:
        if text:
            (tmp_path / "run.toml").write_text(text, encoding="utf-8")
        result = command("doctor", *(["run.toml"] if text else []), *arguments, "--json")
        content = json.loads(result.out)
        assert content["ok"] == (result.code == 0)
        for check in content["checks"]:
            assert bool(check["fix"]) == (check["status"] != "ok"), check
        return result.code, {check["name"]: check for check in content["checks"]}

    return call


def test_without_a_configuration_everything_is_shown_and_nothing_is_needed(doctor: Any) -> None:
    code, found = doctor()
    assert code == 0
    for name in (
        "python",
        "disk",
        "retrain-core",
        "retrain-core[wandb]",
        "retrain-tinker",
        "retrain-prime-rl",
        "hub",
        "retrain-sepa[semantic]",
        "torch",
        "cpu",
    ):
        assert name in found
    assert found["hub"]["status"] == "warn"
    assert not any(check["needed"] for check in found.values())


def test_a_configuration_that_can_run_has_all_it_needs(doctor: Any) -> None:
    code, found = doctor(SMALL)
    assert code == 0
    assert {name: found[name]["status"] for name in ("model", "weights", "device", "run folder", "backend local")} == {
        **dict.fromkeys(("model", "weights", "device", "run folder", "backend local"), "ok")
    }
    assert found["data source arithmetic"]["detail"].startswith("retrain-rewards ")


def test_the_configuration_of_the_folder_is_examined(command: Command, tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text(SMALL)
    result = command("doctor")
    assert result.code == 0
    assert result.out.endswith("Everything that retrain.toml needs is here.\n")


@pytest.mark.parametrize(
    ("blocked", "needs", "idle"),
    first_or_long(
        [
            ("retrain-sepa", {"retrain-sepa", "advantage maxrl", "transform gtpo_sepa"}, {"retrain-local"}),
            ("retrain-local", {"retrain-local", "backend local", "model"}, {"retrain-sepa"}),
            ("retrain-rewards", {"retrain-rewards", "data source arithmetic"}, {"retrain-sepa"}),
        ]
    ),
)
def test_a_distribution_that_is_left_out_is_missed(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, blocked: str, needs: set[str], idle: set[str]
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", blocked)
    code, found = doctor(SMALL)
    assert code == 1
    fatal = {name for name, check in found.items() if check["needed"] and check["status"] in ("missing", "failed")}
    assert needs <= fatal
    assert not idle & fatal
    assert "RETRAIN_BLOCK" in found[blocked]["detail"]
    assert doctor()[0] == 0, "nobody asked for it"


@pytest.mark.parametrize(
    ("text", "name", "fragment"),
    first_or_long(
        [
            (
                '[algorithm]\ntransform_mode = "gtpo_spea"\n',
                "transform gtpo_spea",
                "run.toml:8 [algorithm] transform_mode",
            ),
            ("[training]\nlrr = 1\n", "configuration", "run.toml:8 [training] lrr: unknown key"),
            ('[logging]\nlog_dir = "run.toml/inside"\n', "run folder", "run.toml:8 [logging] log_dir: cannot write"),
            ('[logging]\nlog_dir = "."\n', "run folder", "is the current folder"),
            ('[logging]\nwandb_project = "p"\n', "wandb key", "no key for api.wandb.ai"),
            ('[reward]\ntype = "judge"\njudge_model = "m"\n', "judge's key", "OPENAI_API_KEY is not set"),
            ('[algorithm]\nadvantage_mode = "not_here.f"\n', "advantage not_here.f", "no advantage named"),
        ]
    ),
)
def test_what_the_configuration_needs_and_does_not_have(doctor: Any, text: str, name: str, fragment: str) -> None:
    code, found = doctor(SMALL + text)
    assert code == 1
    assert found[name]["needed"]
    assert fragment in found[name]["detail"]


@pytest.mark.long
def test_a_wandb_key_is_found_where_wandb_looks(doctor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = SMALL + '[logging]\nwandb_project = "p"\n'
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    code, found = doctor(text)
    assert (code, found["wandb key"]["status"]) == (0, "ok")
    assert "0123456789secret" not in json.dumps(found)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert doctor(text)[1]["wandb key"]["status"] == "ok"
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert doctor(text)[1]["wandb key"]["detail"] == f"for api.wandb.ai, in {tmp_path / 'netrc'}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be damaged."""
    folder = tmp_path / "model"
    with resources.as_file(resources.files("retrain_local") / "tiny") as tiny:
        shutil.copytree(tiny, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "name", "fragment"),
    [
        (lambda folder: (folder / "config.json").unlink(), "model", "cannot be read: No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "model", "cannot be read: Expecting"),
        (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "model", "holds no tokenizer"),
        (lambda folder: [file.unlink() for file in folder.glob("*.safetensors")], "weights", "no model.safetensors"),
        (shutil.rmtree, "model", "there is no folder"),
    ],
    ids=["no-config", "bad-config", "no-tokenizer", "no-weights", "no-folder"],
)
def test_a_damaged_model_folder(doctor: Any, model: Path, damage: Any, name: str, fragment: str) -> None:
    text = SMALL.replace("builtin:tiny", str(model))
    assert doctor(text)[0] == 0
    damage(model)
    code, found = doctor(text)
    assert code == 1
    assert fragment in found[name]["detail"]


@pytest.mark.long
def test_a_hub_model_without_network_and_cache(doctor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    code, found = doctor(SMALL.replace("builtin:tiny", "nobody/never-cached-9"))
    assert code == 1
    assert "is not in the cache, and the hub cannot be reached" in found["model"]["detail"]


def test_servers_are_asked(doctor: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://me:hunter22@127.0.0.1:{probe.getsockname()[1]}/v1"
    text = f'[reward]\ntype = "judge"\njudge_model = "m"\njudge_base_url = "{url}"\n'
    code, found = doctor(SMALL + text)
    assert code == 1
    assert found["judge"]["status"] == "failed"
    assert found["judge's key"]["status"] == "warn"
    assert "hunter22" not in json.dumps(found)


@pytest.mark.long
def test_a_file_of_tasks_that_is_not_there(doctor: Any, tmp_path: Path) -> None:
    text = SMALL.replace('source = "arithmetic"', 'source = "files"\npath = "tasks.jsonl"')
    assert "tasks.jsonl does not exist" in doctor(text)[1]["data"]["detail"]
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    assert doctor(text)[0] == 0


@pytest.mark.long
def test_a_plugin_that_failed_to_load_counts_only_when_nothing_else_does(
    doctor: Any, distribution: Callable[..., Path]
) -> None:
    distribution("broken-one", {"broken_one": "raise OSError('libfoo.so')\n"})
    code, found = doctor()
    assert code == 1
    assert found["plugin broken-one 1.0"]["detail"] == "broken_one: OSError: libfoo.so"
    code, found = doctor(SMALL)
    assert code == 0
    assert found["plugin broken-one 1.0"]["status"] == "failed"


@pytest.mark.long
def test_plugins_add_findings_of_their_own(doctor: Any, distribution: Callable[..., Path]) -> None:
    body = 'return [Diagnosis(name="licence", status="missing", detail="ran out", fix="renew it", needed=bool(config))]'
    distribution("strangers", {"strange_doctor": DIAGNOSIS.format(body=body)})
    assert doctor()[0] == 0
    code, found = doctor(SMALL)
    assert (code, found["licence"]["fix"]) == (1, "renew it")


@pytest.mark.long
def test_a_diagnosis_that_raises_is_a_finding(doctor: Any, distribution: Callable[..., Path]) -> None:
    distribution("strangers", {"strange_doctor": DIAGNOSIS.format(body='raise KeyError("oops")')})
    code, found = doctor(SMALL)
    assert code == 0
    assert found["plugin strangers:strange_doctor"]["detail"] == "retrain_diagnose raised KeyError: 'oops'"


@pytest.mark.long
def test_two_owners_of_a_name_matter_when_it_is_asked_for(doctor: Any, distribution: Callable[..., Path]) -> None:
    second = (
        "from retrain.api import PluginSpec, hookimpl\n"
        "@hookimpl\n"
        "def retrain_register_advantages(register):\n"
        '    register(PluginSpec(name="grpo", summary="Mine.", factory=len))\n'
    )
    distribution("second-owner", {"second_owner": second})
    code, found = doctor(SMALL)
    assert (code, found["advantage grpo"]["status"]) == (0, "warn")
    code, found = doctor(SMALL + '[algorithm]\nadvantage_mode = "grpo"\n')
    assert (code, found["advantage grpo"]["status"]) == (1, "missing")


@pytest.mark.long
def test_a_campaign_is_examined_as_the_runs_that_it_starts(doctor: Any) -> None:
    good = '[campaign]\nseeds = [1]\nconditions = [{advantage_mode = "grpo", transform_mode = "none"}]\n'
    assert doctor(SMALL + good)[0] == 0
    code, found = doctor(SMALL + good.replace('"none"', '"nown"'))
    assert code == 1
    assert "nown" in found["configuration"]["detail"]


@pytest.mark.parametrize("text", ["[training\n", ""])
def test_a_file_that_cannot_be_read_is_a_config_error(command: Command, tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "run.toml").write_text(text)
    result = command("doctor", "run.toml")
    assert (result.code, result.out) == (2, "")
    assert "fix: " in result.err


def test_people_read_a_line_each_with_the_fix_below(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL + '[algorithm]\ntransform_mode = "gtpo_spea"\n')
    result = command("doctor", "run.toml")
    assert result.code == 1
    lines = result.out.splitlines()
    (number,) = (i for i, line in enumerate(lines) if "transform gtpo_spea" in line)
    assert lines[number].startswith("missing transform gtpo_spea")
    assert lines[number + 1].strip() == "fix: use 'gtpo_sepa'"
    assert lines[-1] == "1 thing that run.toml needs is missing or broken."


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_of_sampler_and_trainer_agree(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    result = command("doctor", "run.toml", "--logprobs", "--json")
    content = json.loads(result.out)
    assert result.code == 0
    assert content["logprobs"]["prompts"] == 8
    assert content["logprobs"]["tokens"] >= 8
    assert 0.0 <= content["logprobs"]["mean"] <= content["logprobs"]["max"] < 1e-4


def test_a_gap_above_the_limit_fails(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    result = command("doctor", "run.toml", "--logprobs", "--max-gap", "0")
    assert result.code == 1
    assert "the mean must be at most 0" in result.out


@pytest.mark.long
def test_logprobs_need_a_configuration_that_could_run(command: Command, tmp_path: Path) -> None:
    assert command("doctor", "--logprobs").code == 2
    (tmp_path / "run.toml").write_text(SMALL + '[algorithm]\ntransform_mode = "gtpo_spea"\n')
    result = command("doctor", "run.toml", "--logprobs")
    assert result.code == 1
    assert "were not compared: fix the rest first" in result.out


TOY = '[backend]\nbackend = "toy"\n[data]\nsource = "toy"\n[reward]\ntype = "toy"\n[model]\nmodel = "./model"\n'
TELLS = """
def _told(self, rows, temperature):
    logp_V = self._log_softmax(temperature)
    return [np.where(row.action_T, logp_V[row.tokens_T] + {error}, 0.0) for row in rows]

ToyBackend.logprobs = _told
"""


RECOMPUTES = """
from dataclasses import replace as _replace

_drawn = ToyBackend.sample
def _recomputed(self, *arguments):
    return [[_replace(s, engine_logprobs_T={engine}) for s in group] for group in _drawn(self, *arguments)]

ToyBackend.sample = _recomputed
"""


@pytest.fixture
def toy(command: Command, tmp_path: Path, tokenizer_folder: Path, distribution: Callable[..., Path]) -> Command:
    """`toy(error)`: `doctor --logprobs` of a backend whose trainer is off by that much; "" = it reports nothing.

    `toy(error, engine)`: its samples carry the trainer's log-probabilities, and the engine's beside them.
    """
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "run.toml").write_text(TOY)

    def call(error: str, engine: str = "") -> Any:
        source = TOYS.read_text(encoding="utf-8") + (TELLS.format(error=error) if error else "")
        source += RECOMPUTES.format(engine=engine) if engine else ""
        distribution("retrain-toys", {"toy_parts": source})
        choice = ("--inference-engine", "vllm", "--inference-logprobs", "trainer") if engine else ()
        assert engine or command("doctor", "run.toml").code == 0
        return command("doctor", "run.toml", "--logprobs", *choice)

    return call


@pytest.mark.long
def test_a_backend_that_cannot_tell_is_an_error(toy: Command) -> None:
    result = toy("")
    assert result.code == 1
    assert "backend 'toy' does not report its trainer's log-probabilities" in result.err


@pytest.mark.parametrize(("error", "code"), first_or_long([("-0.3", 1), ("0.01", 0)]))
def test_a_trainer_that_is_off_is_found_out(toy: Command, error: str, code: int) -> None:
    result = toy(error)
    assert result.code == code
    assert f"mean gap {abs(float(error)):.2g}, max " in result.out or code == 0


@pytest.mark.parametrize(("engine", "code"), [("s.logprobs_T - 0.3", 1), ("s.logprobs_T + 0.01", 0)])
def test_recomputed_log_probabilities_are_not_compared_with_themselves(toy: Any, engine: str, code: int) -> None:
    result = toy("0.0", engine)
    assert result.code == code
    assert "mean gap 0.3" in result.out or code == 0


@pytest.mark.long
def test_an_engine_of_another_distribution_is_not_called_exact(toy: Any) -> None:
    result = toy("0.0", "None")
    assert result.code == 1
    assert "does not report log-probabilities of the distribution that it samples from" in result.err
    assert "mean gap" not in result.out


@pytest.mark.parametrize("error", first_or_long(["np.nan", "np.inf"]))
def test_what_is_no_number_never_becomes_a_gap(toy: Command, error: str) -> None:
    result = toy(error)
    assert result.code == 1
    assert "log-probabilities of sampler or trainer are not finite" in result.err
    assert "mean gap" not in result.out


class Served(Table):
    """Any table with the key of a server."""

    url: str = ""


def test_the_servers_of_engine_and_backend_are_asked(plugins: Plugins) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    tables = {"inference": Served(url=url), "model": ModelTable.model_construct(model="builtin:tiny", base_url=url)}
    found = {finding.name: finding for finding in diagnose_reach(Config(tables=tables), plugins)}
    assert found["inference server"].is_fatal
    assert found["training service"].is_fatal
    assert found["model"].status == "ok"


def test_each_server_of_a_fleet_is_asked_and_one_is_enough(plugins: Plugins) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serving(ToyModel()) as server:
        away = f"http://127.0.0.1:{silent.getsockname()[1]}"
        silent.close()
        tables = {"inference": Served(url=f"{server.url}, {away}"), "model": ModelTable(model="builtin:tiny")}
        found = diagnose_reach(Config(tables=tables), plugins)
    servers = [(each.status, each.detail.split()[0]) for each in found if each.name == "inference server"]
    assert servers == [("ok", server.url), ("warn", away)]


def test_a_file_that_trains_nothing_asks_for_no_training_parts(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local,retrain-sepa,retrain-rewards")
    code, found = doctor('[squeeze]\nadapter_path = "adapters/final"\n')
    assert not any(name.startswith(("backend ", "model", "transform ")) for name in found)
    assert not any(check["needed"] for name, check in found.items() if name.startswith("retrain-"))
    assert code == 1
    assert "adapters/final: there is no such folder" in found["configuration"]["detail"]


def test_a_table_that_cannot_be_imported_is_told_once(
    command: Command, tmp_path: Path, distribution: Callable[..., Path]
) -> None:
    plugin = (
        "from retrain.api import PluginSpec, hookimpl\n"
        "@hookimpl\n"
        "def retrain_register_config_tables(register):\n"
        '    register(PluginSpec(name="odd", summary="s", factory="there_is_none:Table"))\n'
    )
    distribution("odd-table", {"odd_table": plugin})
    (tmp_path / "run.toml").write_text(SMALL)
    checks = json.loads(command("doctor", "run.toml", "--json").out)["checks"]
    (found,) = (check for check in checks if check["name"] == "plugin odd-table 1.0")
    assert found["detail"].startswith("odd_table: table [odd]: ModuleNotFoundError")
