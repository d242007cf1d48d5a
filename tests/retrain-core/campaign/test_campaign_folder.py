"""The folder that a campaign runs in."""

from pathlib import Path

import pytest

from retrain.campaign.folder import open_campaign
from retrain.campaign.load import load_campaign
from retrain.campaign.manifest import Manifest, new_content
from retrain.campaign.planned import plan_runs
from retrain.kernel.errors import ConfigError, ResumeError
from retrain.records.files import RunLock, write_json
from retrain.records.record_names import CAMPAIGN_CONTENT
from tests.end_to_end.campaigns import manifest
from tests.kit.problems import codes_in, refused

SEEDS = "seeds = [1, 2]\n"
CHANGES = "seeds = [1, 3]\n"


@pytest.fixture
def begin(write, toy_plugins):
    """`begin(campaign, "--flag")`: the folder of a session that is killed at once; with `logs` it has no log_dir."""
    loaded = {}

    def call(campaign, *arguments, logs=False, is_new=False):
        if (key := (campaign, arguments, logs)) not in loaded:
            file = write(campaign)
            text = file.read_text()
            file.write_text(text.replace('[logging]\nlog_dir = "out"\n', "") if logs else text)
            loaded[key] = load_campaign([str(file), *arguments], toy_plugins)
        folder = open_campaign(loaded[key], toy_plugins, is_new=is_new)
        if folder.before is None:
            content = new_content(loaded[key], plan_runs(loaded[key], folder.path), folder.started)
            Manifest(folder.path, content).save()
            write_json(folder.path / CAMPAIGN_CONTENT, loaded[key].content())
        folder.close()
        return folder.path

    return call


def test_without_a_log_dir_it_has_a_folder_under_logs(begin):
    first = begin(SEEDS, logs=True)
    assert first.parent == Path("logs")
    assert first.name.startswith("campaign_2")
    assert begin(SEEDS, logs=True) == first
    assert begin(f"{SEEDS}retries = 3\nparallel = true\nmax_workers = 2", logs=True) == first  # run in another way
    second = begin(SEEDS, logs=True, is_new=True)
    assert second != first
    assert begin(SEEDS, logs=True) == second  # the latest
    assert begin(CHANGES, logs=True) not in (first, second)


def test_a_given_folder_is_the_campaigns(begin):
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert begin(SEEDS) == begin(SEEDS) == Path("out")
    assert Path("out/notes.txt").read_text() == "mine"
    with pytest.raises(ResumeError, match=r"seeds was \[1, 2\] and is now \[3\]") as caught:
        begin("seeds = [3]")
    assert codes_in(caught) == ["campaign.different"]
    assert not Path("out.1").exists()
    begin("seeds = [3]", is_new=True)
    assert (manifest()["seeds"], manifest("out.1")["seeds"]) == ([3], [1, 2])


@pytest.mark.long
def test_resume_of_a_given_folder(begin):
    folder = begin(SEEDS, logs=True)
    resume = ("--resume", str(folder))
    assert begin(SEEDS, *resume, logs=True) == folder
    with pytest.raises(ResumeError) as caught:
        begin(CHANGES, *resume, "--lr", "0.5", logs=True)
    told = str(caught.value)
    assert "seeds was [1, 2] and is now [1, 3]" in told
    assert "conditions grpo+toy_index training.lr was 4e-05 and is now 0.5" in told
    assert "nothing was changed" in told
    assert refused(begin, SEEDS, *resume, logs=True, is_new=True) == ["campaign.resume-and-new"]


def test_resume_of_what_is_no_campaign(begin):
    Path("other").mkdir(exist_ok=True)
    for content in ("", "[]", "{}", '{"sha256": "x", "runs": [1]}', "\x00"):
        Path("other/manifest.json").write_text(content)
        with pytest.raises(ResumeError) as caught:
            begin(SEEDS, "--resume", "other")
        assert codes_in(caught) == ["campaign.not-a-campaign"], content


def test_two_at_a_time_in_one_folder(begin):
    lock = RunLock(begin(SEEDS))
    with pytest.raises(ConfigError, match="in progress"):
        begin(SEEDS)
    lock.release()
