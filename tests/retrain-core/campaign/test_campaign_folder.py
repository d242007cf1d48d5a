"""Which folder a campaign runs in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.campaign.folder import open_campaign
from retrain.campaign.load import Campaign
from retrain.campaign.manifest import Manifest, new_content
from retrain.campaign.planned import plan_runs
from retrain.kernel.errors import ConfigError, ResumeError
from retrain.kernel.plugins.discover import load_plugins
from retrain.records.files import RunLock, write_json
from retrain.records.record_names import CAMPAIGN_CONTENT

Load = Callable[..., Campaign]
SEEDS = "seeds = [1, 2]\n"


@pytest.fixture
def load_free(write: Callable[..., Path], load_text: Load) -> Load:
    """The same without a log_dir of its own."""
    from retrain.campaign.load import load_campaign

    def load(*texts: str, arguments: tuple[str, ...] = ()) -> Campaign:
        file = write(*texts)
        file.write_text(file.read_text().replace('[logging]\nlog_dir = "out"\n', ""))
        return load_campaign([str(file), *arguments], load_plugins({}))

    return load


def begin(campaign: Campaign, *, is_new: bool = False) -> Path:
    """As a session begins that is killed at once."""
    folder = open_campaign(campaign, load_plugins({}), is_new=is_new)
    if folder.before is None:
        Manifest(folder.path, new_content(campaign, plan_runs(campaign, folder.path), folder.started)).save()
        write_json(folder.path / CAMPAIGN_CONTENT, campaign.content())
    folder.close()
    return folder.path


def test_a_campaign_of_its_own_under_logs(load_free: Load) -> None:
    first = begin(load_free(SEEDS))
    assert first.parent == Path("logs")
    assert first.name.startswith("campaign_2")
    assert begin(load_free(SEEDS)) == first  # the same again goes on
    assert (
        begin(load_free(SEEDS + "retries = 3\nparallel = true\nmax_workers = 2")) == first
    )  # so does another way to run it
    second = begin(load_free(SEEDS), is_new=True)
    assert second != first
    assert begin(load_free(SEEDS)) == second  # the latest
    assert begin(load_free("seeds = [1, 3]")) not in (first, second)
    assert begin(load_free(SEEDS, arguments=("--lr", "0.5"))) not in (first, second)


def test_a_given_folder_is_the_campaigns(load_text: Load) -> None:
    assert begin(load_text(SEEDS)) == Path("out")
    assert begin(load_text(SEEDS)) == Path("out")
    assert not Path("out.1").exists()
    with pytest.raises(ResumeError, match=r"seeds was \[1, 2\] and is now \[3\]"):
        begin(load_text("seeds = [3]"))
    assert not Path("out.1").exists()
    begin(load_text("seeds = [3]"), is_new=True)
    assert json.loads(Path("out/manifest.json").read_text())["seeds"] == [3]
    assert json.loads(Path("out.1/manifest.json").read_text())["seeds"] == [1, 2]


def test_a_folder_with_other_files_is_left_alone(load_text: Load) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert begin(load_text(SEEDS)) == Path("out")
    assert Path("out/notes.txt").read_text() == "mine"


@pytest.mark.long
def test_resume_of_a_given_folder(load_text: Load, load_free: Load) -> None:
    folder = begin(load_free(SEEDS))
    assert begin(load_free(SEEDS, arguments=("--resume", str(folder)))) == folder
    with pytest.raises(ResumeError) as caught:
        begin(load_free("seeds = [1, 3]", arguments=("--resume", str(folder), "--lr", "0.5")))
    told = str(caught.value)
    assert "seeds was [1, 2] and is now [1, 3]" in told
    assert "conditions grpo+toy_index training.lr was 4e-05 and is now 0.5" in told
    assert "nothing was changed" in told
    with pytest.raises(ConfigError, match="contradict"):
        begin(load_free(SEEDS, arguments=("--resume", str(folder))), is_new=True)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": "x", "runs": [1]}', "\x00"])
def test_resume_of_what_is_no_campaign(load_text: Load, content: str) -> None:
    campaign = load_text(SEEDS, arguments=("--resume", "other"))
    Path("other").mkdir()
    Path("other/manifest.json").write_text(content)
    with pytest.raises(ResumeError, match="cannot be read"):
        begin(campaign)


def test_two_at_a_time_in_one_folder(load_text: Load) -> None:
    folder = begin(load_text(SEEDS))
    lock = RunLock(folder)
    with pytest.raises(ConfigError, match="in progress"):
        begin(load_text(SEEDS))
    lock.release()


def test_a_plan_is_sealed_and_part_of_the_campaign(load_text: Load) -> None:
    plan = '[campaign.plan]\nhypothesis = "better"\nbaseline = "grpo+toy_index"\n'
    folder = begin(load_text(SEEDS + plan))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["plan"]["baseline"] == "grpo+toy_index"
    assert len(manifest["plan"]["sha256"]) == 64
    with pytest.raises(ResumeError, match="plan hypothesis was 'better' and is now 'worse'"):
        begin(load_text(SEEDS + plan.replace("better", "worse")))
    begin(load_text(SEEDS + plan.replace("better", "worse")), is_new=True)
    assert Path("out.1").exists()
