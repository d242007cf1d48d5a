"""The soak's referee notices what it is there for, faults and configurations are what they say; a minute of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak.__main__ import main
from tests.soak.configurations import SHAPES, pool_of
from tests.soak.damages import DAMAGES
from tests.soak.faults import BLOWS, TROUBLES, Damage, Fault
from tests.soak.referee import PromiseError, check_same
from tests.soak.scenario import Account, Befallen, Report, Scenario


def run_in(folder: Path, loss: float = 0.5) -> Path:
    """The least that is compared."""
    (folder / "inputs").mkdir(parents=True)
    (folder / "inputs/files.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": loss, "step_time_s": id(folder)}) + "\n")
    (folder / "config.toml").write_text(f'log_dir = "{folder.name}"\n')
    (folder / "adapter/final").mkdir(parents=True)
    (folder / "adapter/final/adapter_model.safetensors").write_bytes(b"weights")
    return folder


def test_time_and_places_apart_the_runs_are_the_same(tmp_path: Path) -> None:
    ours = run_in(tmp_path / "ours")
    (ours / "adapter/checkpoint_step_3").mkdir()
    (ours / "adapter/checkpoint_step_3/adapter_model.safetensors").write_bytes(b"of a stop")
    check_same(ours, run_in(tmp_path / "twin"), is_campaign=False)


def test_another_number_weight_or_file_is_named(tmp_path: Path) -> None:
    twin = run_in(tmp_path / "twin")
    with pytest.raises(PromiseError, match=r"metrics.jsonl .* line 1, \['loss'\], 0.25, not 0.5"):
        check_same(run_in(tmp_path / "number", loss=0.25), twin, is_campaign=False)
    flipped = run_in(tmp_path / "flipped")
    (flipped / "adapter/final/adapter_model.safetensors").write_bytes(b"weighty")
    with pytest.raises(PromiseError, match=r"adapter_model\.safetensors is another one"):
        check_same(flipped, twin, is_campaign=False)
    (flipped / "adapter/final/adapter_model.safetensors").unlink()
    with pytest.raises(PromiseError, match=r"adapter_model.safetensors'\] are missing"):
        check_same(flipped, twin, is_campaign=False)
    check_same(flipped, twin, is_campaign=False, lost=["adapter/"])
    more = run_in(tmp_path / "more")
    (more / "eval.jsonl").write_text("{}")
    with pytest.raises(PromiseError, match=r"\['eval.jsonl'\] are of no run"):
        check_same(more, twin, is_campaign=False)


def test_every_fault_has_a_name_of_its_own_and_a_shape_that_it_can_befall() -> None:
    faults: list[Fault | Damage] = [*BLOWS, *TROUBLES, *DAMAGES]
    names = [fault.name for fault in faults]
    assert sorted(set(names)) == sorted(names)
    pools = [configuration for seed in range(4) for configuration in pool_of(seed)]
    assert not [fault.name for fault in faults if not any(map(fault.suits, pools))]


def test_a_seed_says_which_configurations_there_are_and_what_befalls_them(tmp_path: Path) -> None:
    assert pool_of(3) == pool_of(3) != pool_of(4)
    assert [configuration.shape for configuration in pool_of(3)] == list(SHAPES)
    first, again = (
        [Scenario(3, number, pool_of(3), tmp_path, mounts=True) for number in range(2 * len(SHAPES))] for _ in range(2)
    )
    assert [(s.configuration, s.blows) for s in first] == [(s.configuration, s.blows) for s in again]
    assert {s.configuration.shape for s in first[: len(SHAPES)]} == set(SHAPES)


def test_the_report_comes_back_from_its_file_and_counts(tmp_path: Path) -> None:
    report = Report(seed=7, can_mount=True)
    faults = [Befallen(fault="SIGKILL", outcome="resumed", code=-9), Befallen(fault="torn", outcome="missed")]
    report.add(Account(number=0, configuration="plain", faults=faults, processes=2), tmp_path)
    report.add(Account(number=1, configuration="plain", failure="lost"), tmp_path)
    again = Report.of(json.loads((tmp_path / "soak.json").read_text()))
    assert again.markdown() == report.markdown()
    assert "2 scenarios, 2 processes and 1 faults in 0 minutes (seed 7): 1 ended otherwise" in report.markdown()
    assert "| SIGKILL |  | 1 |  |  |" in report.markdown()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_minute_of_it(tmp_path: Path) -> None:
    assert main(["--hours", str(1 / 60), "--seed", "5", "--folder", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "soak.json").read_text())["scenarios"]
