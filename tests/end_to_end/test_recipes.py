"""A run with a recipe: its records, its repetition and its resume; the campaign of the page on recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.running import retrain, tiny, untimed

PAGE = Path(__file__).parents[2] / "docs/pages/algorithms/recipes.md"
TOML = """
[model]
model = "builtin:tiny"
[backend]
devices = "cpu"
[data]
source = "arithmetic"
[algorithm]
recipe = "dapo"
[training]
seed = 1
batch_size = 4
group_size = 4
max_tokens = 32
lr = 3e-3
save_every = 2
"""


@pytest.mark.long
def test_a_run_is_named_after_its_recipe_repeats_from_its_records_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text(TOML, encoding="utf-8")
    tiny("--max-steps", "3", "--log-dir", "a", cwd=tmp_path)
    manifest = json.loads((tmp_path / "a/run.json").read_text())
    assert (manifest["condition"], manifest["origins"]["algorithm.loss"]) == ("dapo", "recipe dapo")
    tiny("a/config.toml", "--log-dir", "again", cwd=tmp_path)
    assert untimed(tmp_path / "again/metrics.jsonl") == untimed(tmp_path / "a/metrics.jsonl")
    tiny("--max-steps", "2", "--log-dir", "b", cwd=tmp_path)
    refused = retrain("--resume", "b", "--max-steps", "3", "--recipe", "cispo", cwd=tmp_path)
    assert refused.code != 0
    assert "algorithm.recipe was 'dapo' and is now 'cispo'" in refused.err
    tiny("--resume", "b", "--max-steps", "3", cwd=tmp_path)
    assert untimed(tmp_path / "b/metrics.jsonl") == untimed(tmp_path / "a/metrics.jsonl")


@pytest.mark.long
@pytest.mark.parametrize("name", ["group-advantages", "losses", "more-losses", "sampling"])
def test_the_configuration_of_a_page_runs_as_it_is(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (PAGE.parent / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "retrain.toml").write_text(next(each for each in blocks if "tiny" in each), encoding="utf-8")
    tiny("--max-steps", "1", "--log-dir", "a", cwd=tmp_path)
    assert json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[-1])["trained_tokens"] > 0


@pytest.mark.long
def test_the_campaign_of_the_page_runs_and_is_compared_and_reported(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    campaign = next(block for block in blocks if '{ recipe = "reinforce_pp_baseline" }' in block)
    (tmp_path / "recipes.toml").write_text(campaign, encoding="utf-8")
    few = ("--campaign-max-steps", "2", "--batch-size", "2", "--eval-examples", "4")
    done = retrain("recipes.toml", *few, cwd=tmp_path)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "logs").glob("campaign_*")
    compared = json.loads(retrain("compare", str(folder), "--json", cwd=tmp_path).out)
    assert [(each["condition"], len(each["seeds"])) for each in compared["conditions"]] == [
        (name, 3)
        for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    ]
    assert compared["undeclared"] == []  # the conditions differ in what their recipes say, and in nothing else
    reported = retrain("report", str(folder), cwd=tmp_path)
    assert reported.code == 0, reported.err
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "8 conditions × 3 seeds, 24 runs: 24 done" in page
    assert "algorithm.aggregation" in page
