"""`retrain compare` through the command line, on campaigns and run folders."""

import json
import shutil

import pytest
from scipy.stats import binomtest

import retrain
from retrain.kernel.errors import ConfigError
from retrain.verdicts.study.study import DEFAULT_ALPHA
from tests.kit.edited import edit, edit_lines
from tests.kit.problems import codes_in

EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1, "maxrl+gtpo": -0.1}


@pytest.fixture
def campaign(made, tmp_path):
    """`campaign(seeds=..., steps=..., states=...)`: the folder `c`."""

    def make(effects=EFFECTS, *, seeds=range(8), steps=20, **more):
        return made.write_campaign(tmp_path / "c", effects, seeds=seeds, steps=steps, **more)

    return make


def by_condition(content):
    return {each["condition"]: each for each in content["comparisons"]}


def test_clear_effects_have_verdicts(campaign, compare_json, compare):
    folder = campaign()
    content = compare_json(folder)
    verdicts = {name: each["verdict"] for name, each in by_condition(content).items()}
    assert verdicts == {"maxrl+none": "better", "maxrl+gtpo": "worse"}
    assert (content["metric"], content["align"], content["budget"]) == ("eval_correct_rate:final", "steps", 20)
    assert content["alpha"] == DEFAULT_ALPHA
    first = content["conditions"][0]
    assert (first["condition"], first["seeds"], first["num_runs"]) == ("grpo+none", list(range(8)), 8)
    assert set(first["metrics"]) == {
        *(f"{field}:{part}" for field in ("correct_rate", "eval_correct_rate") for part in ("final", "best", "auc")),
        *("eval_pass_at_2:final", "eval_pass_at_4:final"),
    }
    shown = compare(folder).out
    assert "3 conditions, 24 runs: 24 compared\n" in shown
    line = next(each for each in shown.splitlines() if each.startswith("maxrl+gtpo: worse: -"))
    assert "), over 8 seeds, on these 64 examples. Worst seed of each: grpo+none " in line
    assert line.endswith("Exploratory: no plan was registered; 1 look.")
    assert "p = 0.016 after Holm's correction over 2, at most 0.05" in shown
    assert "Fisher" not in shown


def test_a_graded_reward_can_decide_and_is_shown_where_it_says_more_than_the_rate(campaign, compare_json, compare):
    folder = campaign()
    same = folder / "same"
    shutil.copytree(folder / "runs", same)
    for run in (folder / "runs").iterdir():
        rewrite(run / "metrics.jsonl", lambda rate: 1.0 - rate)  # the other way round
        rewrite(same / run.name / "metrics.jsonl", lambda rate: rate)
    content = compare_json(folder)
    assert content["metric"] == "eval_correct_rate:final"
    assert all("eval_mean_reward:final" in each["metrics"] for each in content["conditions"])
    graded = by_condition(compare_json(folder, "--metric", "eval_mean_reward"))
    assert {name: each["verdict"] for name, each in graded.items()} == {"maxrl+none": "worse", "maxrl+gtpo": "better"}
    binary = compare_json(*sorted(same.iterdir()))
    assert all("eval_mean_reward:final" not in each["metrics"] for each in binary["conditions"])
    assert "did you mean 'eval_mean_reward'?" in compare(folder, "--metric", "eval_mean_rewrd").err


def rewrite(file, reward):
    """Give each evaluation a mean reward made of its correct rate."""
    name = "eval_correct_rate"
    edit_lines(file, lambda line: line.update({"eval_mean_reward": reward(line[name])} if name in line else {}))


def test_values_are_those_of_the_files(campaign, compare_json):
    folder = campaign()
    content = compare_json(folder, "--last", "1")
    for condition in content["conditions"]:
        for seed in condition["seeds"]:
            file = folder / f"runs/{condition['condition']}_s{seed}/metrics.jsonl"
            last = json.loads(file.read_text().splitlines()[-1])
            for field in ("correct_rate", "eval_correct_rate", "eval_pass_at_4"):
                assert condition["metrics"][f"{field}:final"]["values"][str(seed)] == last[field]


def test_one_seed_and_one_condition(campaign, compare, compare_json):
    folder = campaign(seeds=[5])
    content = compare_json(folder)
    for name, each in content["conditions"][0]["metrics"].items():  # the examples are many although the seed is one
        assert (each["interval"] is not None) == (name.startswith("eval_") and "reward" not in name)
    assert "With 1 seed in common the smallest possible p is 1" in compare(folder).out
    shutil.rmtree(folder)
    folder = campaign({"grpo+none": 0.0})
    assert compare_json(folder)["comparisons"] == []
    assert "Only one condition: there is nothing to compare it with." in compare(folder).out


def test_runs_that_did_not_end_are_told_never_averaged(campaign, compare, compare_json):
    states = {("maxrl+none", 1): "failed", ("maxrl+gtpo", 2): "running", ("maxrl+gtpo", 3): "stopped"}
    folder = campaign(states=states)
    shutil.rmtree(folder / "runs/grpo+none_s7")
    content = compare_json(folder)
    assert {(each["name"], each["reason"]) for each in content["left_out"]} == {
        ("maxrl+none_s1", "failed"),
        ("maxrl+gtpo_s2", "dead"),
        ("maxrl+gtpo_s3", "stopped"),
        ("grpo+none_s7", "not started"),
    }
    assert content["budget"] == 20
    assert by_condition(content)["maxrl+gtpo"]["seeds"] == [0, 1, 4, 5, 6]
    shown = compare(folder).out
    assert "24 runs: 20 compared" in shown
    assert "maxrl+gtpo: 6 of 8 runs are compared; those that ended early may be worse" in shown


def test_at_takes_every_run_that_got_there(campaign, compare_json):
    folder = campaign(states={("maxrl+none", 1): "failed"}, eval_every=5)
    content = compare_json(folder, "--at", "10")
    assert (content["left_out"], content["budget"], content["shortest"]) == ([], 10, [])
    [left] = compare_json(folder, "--at", "11")["left_out"]
    assert left["reason"] == "failed after 10 steps"


def test_runs_of_different_length_are_cut_at_the_shortest(made, tmp_path, compare_json):
    for condition, steps in (("grpo+none", 20), ("maxrl+none", 30)):
        for seed in range(3):
            run = made.MadeRun(condition=condition, seed=seed, steps=steps + seed, eval_every=0)
            made.write_run(tmp_path / f"{condition}{seed}", run)
    content = compare_json(*sorted(tmp_path.iterdir()), "--last", "1")
    assert (content["budget"], content["metric"]) == (20, "correct_rate:final")
    assert content["shortest"] == [str(tmp_path / "grpo+none0")]
    line = json.loads((tmp_path / "maxrl+none2/metrics.jsonl").read_text().splitlines()[19])
    assert content["conditions"][1]["metrics"]["correct_rate:final"]["values"]["2"] == line["correct_rate"]


def test_equal_rates_of_training_have_the_limits_of_their_prompts(made, tmp_path, compare_json):
    sizes = {"grpo+none": 2, "maxrl+none": 64, "none+none": 1, "most+none": 10**6, "more+none": 1}
    recorded = sizes | {"none+none": 0, "more+none": 10**6 + 1}  # both are damaged
    for condition, prompts in recorded.items():
        for seed in range(4):
            run = made.MadeRun(
                condition=condition, seed=seed, eval_every=0, config={"training": {"batch_size": prompts}}
            )
            folder = made.write_run(tmp_path / f"{condition}{seed}", run)
            edit_lines(folder / "metrics.jsonl", lambda line: line.update(correct_rate=0.5))
    widths = {}
    for each in compare_json(*sorted(tmp_path.iterdir()))["conditions"]:
        low, high = each["metrics"]["correct_rate:final"]["interval"]
        trials = 4 * sizes[each["condition"]]
        exact = binomtest(trials // 2, trials).proportion_ci(method="exact")
        assert (low, high) == pytest.approx((exact.low, exact.high))
        widths[each["condition"]] = high - low
    assert widths["maxrl+none"] < widths["grpo+none"]


def test_the_same_condition_and_seed_twice_counts_once(made, tmp_path, compare_json):
    for name in ("a", "b", "d"):
        made.write_run(tmp_path / name, made.MadeRun(seed=4))
    edit(tmp_path / "d/run.json", lambda record: record.update(seed=None))
    made.write_run(tmp_path / "c", made.MadeRun(condition="grpo+none", seed=4))
    content = compare_json("a", "b", "./c", "c", "a/", "d")
    left_out = {each["name"]: each["reason"] for each in content["left_out"]}
    assert left_out == {"b": "the same condition and seed as a", "d": "no seed is recorded"}
    assert [each["num_runs"] for each in content["conditions"]] == [3, 1]


def test_runs_of_one_name_with_other_settings_are_other_conditions(made, tmp_path, compare_json):
    for lr in (0.001, 0.002):
        for seed in (1, 2):
            config = {"training": {"lr": lr}, "logging": {"wandb_project": str(lr)}}
            made.write_run(tmp_path / f"{lr}_{seed}", made.MadeRun(seed=seed, config=config))
    content = compare_json(*sorted(tmp_path.iterdir()))
    assert [each["condition"] for each in content["conditions"]] == [
        "maxrl+none~training.lr=0.001",
        "maxrl+none~training.lr=0.002",
    ]


def test_damage_leaves_one_run_out_and_is_told(campaign, compare_json):
    folder = campaign()
    runs = folder / "runs"
    with (runs / "grpo+none_s0/metrics.jsonl").open("a") as stream:
        stream.write('{"step": 20, "corr')  # killed in mid-write, then called done: nothing is wrong with the rest
    lines = (runs / "grpo+none_s1/metrics.jsonl").read_text().splitlines(keepends=True)
    lines[7] = '{"step": 6, "correct_rate": NaN}\n'
    (runs / "grpo+none_s1/metrics.jsonl").write_text("".join(lines))
    (runs / "grpo+none_s2/run.json").write_text("{")
    (runs / "grpo+none_s3/metrics.jsonl").unlink()
    (runs / "grpo+none_s4/metrics.jsonl").write_text("")
    (runs / "grpo+none_s5/metrics.jsonl").write_text('{"step": -1, "eval_correct_rate": 0.5}\n')
    content = compare_json(folder)
    told = {each["name"]: each["reason"] for each in content["left_out"]}
    assert told["grpo+none_s1"] == "metrics.jsonl:8: cannot be read: NaN is not JSON"
    assert "run.json:1: cannot be read" in told["grpo+none_s2"]
    assert "No such file" in told["grpo+none_s3"]
    assert told["grpo+none_s4"] == told["grpo+none_s5"] == "no finished step"
    assert content["conditions"][0]["seeds"] == [0, 6, 7]


def test_a_run_without_a_field_has_no_number_not_zero(campaign, compare_json):
    folder = campaign(eval_every=5)
    file = folder / "runs/maxrl+none_s3/metrics.jsonl"
    edit_lines(file, lambda line: (line.pop("eval_correct_rate", None), line.update(mean_reward=None)))
    content = compare_json(folder, "--metric", "eval_correct_rate")
    found = by_condition(content)["maxrl+none"]
    assert found["seeds"] == [0, 1, 2, 4, 5, 6, 7]
    assert compare_json(folder)["metric"] == "correct_rate:final"  # held-out decides only where every run has it
    rewards = compare_json(folder, "--metric", "mean_reward:auc")
    assert by_condition(rewards)["maxrl+none"]["seeds"] == [0, 1, 2, 4, 5, 6, 7]


def test_all_pairs_and_other_baselines(campaign, compare_json):
    folder = campaign()
    pairs = compare_json(folder, "--all-pairs")["comparisons"]
    assert [(each["baseline"], each["condition"]) for each in pairs] == [
        ("grpo+none", "maxrl+none"),
        ("grpo+none", "maxrl+gtpo"),
        ("maxrl+none", "maxrl+gtpo"),
    ]
    assert {each["num_comparisons"] for each in pairs} == {3}
    turned = by_condition(compare_json(folder, "--baseline", "maxrl+none"))
    assert set(turned) == {"grpo+none", "maxrl+gtpo"}
    assert turned["grpo+none"]["verdict"] == "worse"


def test_what_names_hold_cannot_steer_a_terminal_or_a_page(campaign, compare):
    evil = "grpo+\x1b[2J|<script>[bold]*x*"
    states = {(evil, 1): "failed"}
    folder = campaign({evil: 0.0, "maxrl+none": 0.0}, states=states)
    file = folder / "runs" / "maxrl+none_s1" / "metrics.jsonl"
    file.write_text("\x1b]0;owned\x07\n" + file.read_text())
    for arguments in ([], ["--markdown"]):
        out = compare(folder, *arguments).out
        assert not {"\x1b", "\x07"} & set(out)
    assert "grpo+\ufffd[2J|<script>[bold]*x* (baseline)" in compare(folder).out
    page = compare(folder, "--markdown").out
    assert "<script>" not in page
    assert r"grpo+\ufffd\[2J\|\<script\>\[bold\]\*x\* (baseline)".replace(r"\ufffd", "\ufffd") in page
    [rows] = [page.split("### Verdicts")[1].split("###")[0]]
    bars = {line.replace(r"\|", "").count("|") for line in rows.splitlines() if line.startswith("|")}
    assert len(bars) == 1


REFUSED = {
    "compare.no-such-run": (["nowhere"], ["c/runs"]),
    "compare.campaign-with-runs": (["c", "c/runs/grpo+none_s0"],),
    "compare.unknown-metric": (["c", "--metric", "correct_rat"],),
    "compare.bad-metric": (["c", "--metric", "correct_rate:median"], ["c", "--metric", ""]),
    "compare.unknown-baseline": (["c", "--baseline", "x"],),
    "compare.bad-option": (["--at", "nan"], ["--at", "inf", "--align", "tokens"], ["--alpha", "nan"], ["--at", "2.5"]),
    "compare.no-run-ready": (["c", "--at", "21"],),
    "usage.bad-arguments": ([], *(["--align", "money"], ["--at", "0"], ["--last", "0"], ["--json", "--markdown"])),
}


@pytest.mark.parametrize("code", REFUSED)
def test_usage_errors_are_exit_code_2(campaign, compare, code):
    campaign()
    for arguments in REFUSED[code]:
        result = compare(*(["c"] if arguments[:1] and arguments[0].startswith("-") else []), *arguments)
        assert (result.code, result.out, codes_in(result.err)) == (2, "", [code])


BAD = [("align", "epochs"), *(("at", value) for value in (float("nan"), -1.0, 0, 2.5)), ("last", 0)]
BAD += [("alpha", value) for value in (0.0, 0.5)]


@pytest.mark.parametrize(("name", "value"), [*BAD, ("metric", "")])
def test_an_option_that_cannot_be_is_named_as_in_python(tmp_path, name, value):
    with pytest.raises(ConfigError) as caught:
        retrain.compare(tmp_path, **{name: value})
    assert codes_in(caught) == ["compare.bad-metric" if name == "metric" else "compare.bad-option"]
    assert f"{name}=..." in caught.value.problems[0].where


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"conditions": [], "runs": 3}', '{"runs": [], "conditions": []}']
)
def test_a_manifest_that_is_none_is_an_error(tmp_path, compare, content):
    (tmp_path / "manifest.json").write_text(content)
    result = compare(tmp_path)
    assert (result.code, result.out) == (2, "")
    assert codes_in(result.err)[0] in ("campaign.no-manifest", "record.unreadable", "compare.no-run-ready")


def test_python_and_markdown_say_what_the_command_says(made, compare, compare_json, tmp_path):
    folder = made.write_campaign(tmp_path / "c", {"grpo+none": 0.0, "<i>+none": 0.1}, seeds=range(6), steps=10)
    retrain.compare(folder)  # the first look begins the ledger, and says that nothing is known before it
    found = retrain.compare(folder, metric="correct_rate:auc", align="tokens", alpha=0.1, baseline="<i>+none")
    options = ["--metric", "correct_rate:auc", "--align", "tokens", "--alpha", "0.1", "--baseline", "<i>+none"]
    assert found.data == compare_json(folder, *options)
    assert [each["verdict"] for each in found.verdicts] == ["worse"]
    assert type(found.verdicts[0]["verdict"]) is str
    told = compare(folder, *options).out
    assert [line.split() for line in repr(found).splitlines()][3:7] == [line.split() for line in told.splitlines()][2:6]
    assert "&lt;i&gt;+none" in found._repr_html_()
    assert "<i>" not in found._repr_html_()
    runs = sorted(path for path in (folder / "runs").iterdir() if path.is_dir())
    assert retrain.compare(map(retrain.load, runs[:2])).data["conditions"]
    page = compare(folder, *options, "--markdown").out
    assert "## Comparison of " in page
    assert r"| grpo+none | \<i\>+none | 6 |" in page
