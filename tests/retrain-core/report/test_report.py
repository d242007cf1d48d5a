"""`retrain report` and the page of `retrain credit`: what is on the pages, and that they ask for nothing."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from rich.console import Console

from retrain.kernel.types import Turns
from retrain.report.heat import Scale, ShadedCompletion, ShadedStep, render, show
from retrain.report.shell import own
from tests.kit.browser import in_frame, needs_chromium
from tests.kit.problems import codes_in
from tests.kit.tables import cells

Make = Callable[..., Path]
PageOf = Callable[..., tuple[str, dict[str, Any]]]
PLUGIN = """
from retrain.api import ReportPlot, ReportSection, hookimpl

@hookimpl
def retrain_report_sections(run):
    if run.seed == 7:
        raise ValueError("no <b>")
    plot = ReportPlot(
        title="<b>", note="<b>", x=(1, 2), lines={"<b>line": (1.0, float("nan"))}, points=(None, 0.5),
        labels=("<b>", chr(0)), x_title="<b>", y_title="<b>", heads=("<b>",), rows=[("<b>",)],
    )
    text = f"<b>1</b> {run.condition} {run.config.training.seed} {run.folder.name}"
    section = ReportSection(name="curves", text="<b>", plots=[plot], files=[run.folder / "<b>"])
    return {"<i>Mine</i>": text, "<b>Mine": section}
"""


def seen(page: str) -> str:
    """The text of a page, without markup and what only scripts read."""
    body = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def data_of(page: str) -> dict[str, Any]:
    """The data that the plots are drawn from."""
    content: dict[str, Any] = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    return content


def numbers(page: str, title: str) -> list[str]:
    """The cells of the table below a chart."""
    return re.findall("<td[^>]*>([^<]*)</td>", page.split(f"{title}</caption>")[1].split("</table>")[0])


def test_a_campaign_is_one_page_that_asks_for_nothing(campaign: Make, page_of: PageOf) -> None:
    folder = campaign(seeds=range(10))
    page, said = page_of(folder)
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    before_scripts = page.split("<script")[0]
    assert not re.search(r"(src|action|srcset|poster|background)\s*=|\son\w+\s*=|style=", before_scripts)
    addresses = re.findall(r'href="([^"]*)"', page)
    assert not [each for each in addresses if not each.startswith(("#", "./", "../"))]
    links = [unquote(each) for each in addresses if each.startswith(".")]
    assert len(links) > 20
    assert all((folder / link).exists() for link in links)
    assert said["file"] == str(folder / "report.html")
    assert said["bytes"] == len(page.encode()) < 3_500_000
    assert (said["runs"], said["states"]) == (30, {"done": 30})
    assert said["verdicts"]["maxrl+gtpo_sepa vs grpo+none"] == "better"
    assert " ".join(said["sections"]) == "summary verdict curves budget time signal settings completions health files"
    text = seen(page)
    for expected in cells("""
        3 conditions × 10 seeds, 30 runs: 30 done.  ▲ better  Exploratory: no plan was registered
        builtin:tiny  Linux x86_64, 2 cores  cccccccccccc  torch 2.13.0+cpu  No health finding in any run
        Let me think.
    """):
        assert expected in text, expected
    kinds = [figure["kind"] for figure in data_of(page)["figures"]]
    assert kinds[0] == "forest"
    assert kinds.count("curves") >= 12
    assert kinds.count("bars") == 2
    assert page.count('<div class="plot ') == len(kinds) == said["figures"]


def test_a_warm_up_has_its_curves_and_a_schedule_one_of_its_rate(made: Any, page_of: PageOf, tmp_path: Path) -> None:
    folder, rates = made.write_run(tmp_path / "warm", made.MadeRun(steps=4, eval_every=0)), (1e-3, 2e-3, 3e-3, 4e-3)
    file = folder / "metrics.jsonl"
    steps = [json.loads(line) | {"lr": rate} for line, rate in zip(file.read_text().splitlines(), rates, strict=True)]
    losses = {-4: 2.0, -3: None, -2: 0.5}
    warm_up = [{"step": s, "phase": "sft", "sft_loss": loss, "sft_lr": 0.01} for s, loss in losses.items()]
    file.write_text("".join(json.dumps(line) + "\n" for line in (*warm_up, *steps)))
    page, _ = page_of(folder)
    assert numbers(page, "Supervised loss")[:4] == ["2", "0.5", "0.5", "2"]
    figures = [figure for figure in data_of(page)["figures"] if figure["kind"] == "curves"]
    (supervised,) = (figure for figure in figures if figure["x_title"] == "supervised steps")
    assert supervised["x"] == [1.0, 2.0, 3.0]
    assert "Supervised learning rate 0.01" in seen(page)
    assert numbers(page, "Learning rate")[:2] == ["0.001", "0.004"]
    file.write_text("".join(json.dumps(line) + "\n" for line in warm_up[:2]))
    page, _ = page_of(folder)
    assert "Supervised loss" in seen(page)
    assert "-2" not in seen(page).partition("Curves")[0]


@pytest.mark.parametrize("damage", ["no metrics", "empty", "not begun", "no run.json", "all failed"])
def test_a_run_without_records_still_has_a_page(made: Any, page_of: PageOf, tmp_path: Path, damage: str) -> None:
    states = {(name, 1): "failed" for name in ("a+none", "b+none")} if damage == "all failed" else {}
    folder = made.write_campaign(tmp_path / "campaign", {"a+none": 0.0, "b+none": 0.0}, seeds=[1], states=states)
    run = folder / "runs" / "a+none_s1"
    match damage:
        case "no metrics":
            (run / "metrics.jsonl").unlink()
        case "empty":
            (run / "metrics.jsonl").write_text("")
            (run / "emergence" / "generations.jsonl").write_text("")
        case "not begun":
            (run / "run.json").unlink()
        case "no run.json":
            (run / "run.json").write_text("{")
    page, said = page_of(folder)
    assert (said["runs"], "a+none_s1" in seen(page)) == (2, True)
    if states:
        assert "no run can be compared" in said["not_compared"]
        assert "Nothing can be compared" in seen(page)
        assert any(figure["kind"] == "curves" for figure in data_of(page)["figures"])


def test_unfinished_runs_come_first_on_a_page_that_repeats(campaign: Make, page_of: PageOf) -> None:
    states = {("maxrl+none", 3): "failed", ("grpo+none", 1): "dead", ("maxrl+none", 2): "running"}
    folder = campaign(states=states, error="RewardError: the <b>verifier</b> is down", seeds=range(4))
    (folder / "runs" / "grpo+none_s0" / "metrics.jsonl").write_text('{"step": 0}\ngarbage\n{"step": 2}\n')
    page, said = page_of(folder)
    again, _ = page_of(folder)
    made = re.compile(r"(Made by retrain \S+ on )[-\d]+ [:\d]+(?= UTC)")  # the minute may change between the two
    assert made.sub(r"\1", page) == made.sub(r"\1", again)
    assert sorted(said["unfinished"]) == ["grpo+none_s1", "maxrl+none_s2", "maxrl+none_s3"]  # its process is gone
    text = seen(page)
    assert "3 runs of 12 did not finish" in text
    assert text.index("did not finish") < text.index("builtin:tiny")
    assert "RewardError: the <b>verifier</b> is down" in text
    assert "<b>verifier" not in page
    assert "those that ended early may be worse" in text


def test_settings_code_and_packages_that_differ_are_on_the_page(made: Any, page_of: PageOf, tmp_path: Path) -> None:
    folders = []
    for number, (condition, rate) in enumerate((("a+none", 0.001), ("a+none", 0.001), ("b+none", 0.004))):
        config = {"training": {"lr": rate, "save_every": number}, "data": {"source": "x" * 500}}
        run = made.MadeRun(condition=condition, seed=number, config=config)
        folders.append(made.write_run(tmp_path / f"run{number}", run))
        content = json.loads((folders[-1] / "run.json").read_text())
        content["libraries"]["torch"] = f"2.{number}"
        content["git"] = {"commit": str(number) * 40, "dirty": True}
        (folders[-1] / "run.json").write_text(json.dumps(content))
    page, said = page_of(*folders)
    assert (said["file"], (tmp_path / "report.html").is_file()) == ("report.html", True)
    table = page.split('id="settings"')[1].split("</table>")[0]
    assert re.findall(r'<th scope="col">([^<]*)</th>', table) == ["condition", "training.lr"]
    assert seen(table).split()[-2:] == ["b+none", "0.004"]
    mixed = ("not all made with the same code and packages", "torch 2.0, 2.1, 2.2", "000000000000, uncommitted changes")
    assert [part for part in mixed if part not in seen(page)] == []
    page, said = page_of(made.write_run(tmp_path / "alone", made.MadeRun(completions=8)))
    assert (said["file"], said["title"], said["verdicts"]) == (str(tmp_path / "alone/report.html"), "alone", {})
    assert "settings" not in said["sections"]
    assert seen(page).count("best reward") == 6
    curves = [figure for figure in data_of(page)["figures"] if figure["kind"] == "curves"]
    assert {"mean", "low", "high"} <= set(curves[0]["curves"]["0"])  # the interval of its evaluations


@pytest.mark.long
def test_health_findings_and_the_spectrum_are_there(campaign: Make, page_of: PageOf) -> None:
    layers = [{"module": f"m{i}.<q_proj>", "rank_needed": i + 1, "variance": [0.5, 0.9, 0.95, 1.0]} for i in range(3)]
    rows = [{"rank": rank, "mean_variance": rank / 4, "min_variance": rank / 8} for rank in (1, 2, 4)]
    rows[1]["recommended"] = True
    spectrum = {"source_rank": 4, "recommended_rank": 2, "min_variance_retention": 0.9, "ranks": rows}
    folder = campaign(seeds=[1, 2], squeeze=spectrum)
    metrics = folder / "runs" / "grpo+none_s1" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for number in range(10, 15):
        lines[number] = lines[number][:-1] + ', "health": ["truncation"]}'
    metrics.write_text("\n".join(lines) + "\n")
    page, said = page_of(folder)
    assert "truncation grpo+none_s1 9 to 13 5" in seen(page)
    assert "Rank 2 of 4 keeps 90 % of the variance" in seen(page)
    (folder / "squeeze").mkdir()
    (folder / "squeeze" / "spectrum.json").write_text(json.dumps(spectrum | {"layers": layers}))
    page, said = page_of(folder)
    kept, needed = (figure for figure in data_of(page)["figures"] if figure.get("x_title") in ("rank", "layer"))
    assert kept["thin"] == [[0.5, 0.9, 1.0]] * 3
    assert (kept["x_mark"], kept["y_mark"]) == (2, 0.9)
    assert needed["points"] == [1, 2, 3]
    assert needed["labels"] == ["m0.<q_proj>", "m1.<q_proj>", "m2.<q_proj>"]
    assert "1 25.00% — 12.50% — 2 (recommended) 50.00% — 25.00% — 4 100.00%" in seen(page)
    assert seen(page).count("Rank 2 of 4 keeps 90 % of the variance") == 1
    assert "squeeze" in said["sections"]


@pytest.mark.long
def test_only_graded_rewards_have_charts_of_their_own(campaign: Make, page_of: PageOf) -> None:
    folder = campaign()
    page = page_of(folder)[0]
    assert not re.search("Reward, |Held-out mean reward|Part ", page)
    constants = re.findall(r"The same in all runs at all steps: ([^<]*)", page)
    assert constants
    assert not any(re.search(r"[\[\]']|&#x27;", each) for each in constants)
    for number, file in enumerate(sorted(folder.glob("runs/*/metrics.jsonl"))):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            value = number / 100 + max(line["step"], 0) / 1000
            if line["step"] >= 0:
                line |= {"reward_p10": value / 2, "reward_p50": value, "reward_p90": 2 * value}
                line |= {"reward_<b>math</b>_mean": value, "reward_unique_fraction_mean": value}
            if "eval_correct_rate" in line:
                line |= {"eval_mean_reward": value, "eval_reward_<b>math</b>_mean": value / 3}
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    page, _ = page_of(folder)
    titles = [unescape(title) for title in re.findall(r"<h4>(.*?)</h4>", page)]
    graded = ("Held-out mean reward", "Reward, 10th percentile", "Reward, median", "Reward, 90th percentile")
    assert [titles.count(title) for title in (*graded, "Part <b>math</b>")] == [1, 1, 1, 1, 2]
    assert ([title for title in titles if "unique" in title], "<b>math" in page) == ([], False)


def test_every_task_has_its_training_curve_and_its_share(campaign: Make, page_of: PageOf) -> None:
    tasks = [{"name": "sums"}, {"name": "a_share"}]
    folder = campaign({"grpo+none": 0.0}, seeds=(1, 2), steps=6, config={"data": {"tasks": tasks}})
    for file in folder.glob("runs/*/metrics.jsonl"):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            rate = 0.25 + line["step"] / 100
            line |= {"task_sums_correct_rate": rate, "task_sums_share": rate, "macro_correct_rate": rate}
            line |= {"task_sums_shadow_correct_rate": rate}
            if line["step"] % 2:  # a task may be absent from a step, such as the first
                line |= {"task_a_share_correct_rate": rate, "task_a_share_share": rate}
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    titles = re.findall(r"<h4>(.*?)</h4>", page_of(folder)[0])
    assert [title for title in titles if "task" in title or ", " in title][1:] == [
        *("Correct rate, mean over tasks", "a_share, training batches", "sums, training batches"),
        *("a_share, share", "sums, share"),
    ]


@pytest.mark.long
def test_sections_and_plots_of_plugins_are_escaped(toy_run: Make, distribution: Make, page_of: PageOf) -> None:
    distribution("retrain-sections", {"sections_part": PLUGIN})
    page, said = page_of(toy_run("one"))
    assert {"plugins", "plugin-curves"} <= set(said["sections"])
    for part in ("<i>Mine</i>", "<b>1</b> grpo+toy_flat 1 one", "<b>Mine"):
        assert part in seen(page)
    assert not re.search("<[bi]>", page)
    (figure,) = (each for each in data_of(page)["figures"] if each["kind"] == "plugin" and each["labels"])
    assert figure["lines"] == [{"name": "<b>line", "y": [1.0, None]}]
    assert (figure["x"], figure["points"], figure["labels"]) == ([1, 2], [None, 0.5], ["<b>", "[U+0000]"])
    page, _ = page_of(toy_run("two", "--seed", "7"))
    assert [part for part in ("A plugin failed", "no <b>") if part not in seen(page)] == []


@pytest.mark.long
def test_many_conditions_stay_a_small_page(made: Any, page_of: PageOf, tmp_path: Path) -> None:
    effects = {f"maxrl+none~lr={i}": 0.01 * i for i in range(40)}
    folder = made.write_campaign(tmp_path / "campaign", effects, seeds=[1, 2], steps=300, completions=1)
    page, said = page_of(folder)
    assert len(said["shown"]) == 8
    assert {"maxrl+none~lr=0", "maxrl+none~lr=39"} <= set(said["shown"])
    assert "8 of 40 conditions are drawn at first" in seen(page)
    assert "Downsampled" in seen(page)
    assert said["bytes"] < 5_000_000
    figure = next(each for each in data_of(page)["figures"] if each["kind"] == "curves")
    assert len(figure["curves"]) == 40


def test_what_cannot_be_read_or_written_is_told(report: Callable[..., Any], made: Any, tmp_path: Path) -> None:
    missing = report(tmp_path / "nowhere")
    assert (missing.code, "no such folder" in missing.err) == (2, True)
    folder = made.write_run(tmp_path / "run", made.MadeRun())
    (tmp_path / "file").write_text("")
    refused = report(folder, "-o", tmp_path / "file" / "page.html")
    assert (refused.code, codes_in(refused.err)) == (2, ["report.unwritable"])
    assert re.fullmatch(r"Wrote .*: 1 run, \d+ plots\n", report(folder).out)


HOSTILE = "<script>document.title='owned'</script>"


def completion(*, token_texts: list[str], credit: list[float], reward: float = 1.0, **more: Any) -> ShadedCompletion:
    size = len(token_texts)
    given = {"group": 0, "index": 0, "example_id": "e", "prompt": "p", "reference": "42", "trained": True, **more}
    return ShadedCompletion(
        **given,
        reward=reward,
        token_texts=token_texts,
        logprobs_T=-np.arange(1.0, size + 1),
        planning_T=np.array([i == 1 for i in range(size)], np.bool_),
        entropies_T=np.full(size, 0.5),
        credits=[np.array(credit), np.array(credit) * 2.0],
        is_right=reward > 0.5,
    )


def step(*completions: ShadedCompletion) -> ShadedStep:
    return ShadedStep(run="run", step=3, sepa_lambda=0.5, labels=["a+none", "a+gtpo"], completions=completions)


def test_a_completion_of_several_turns_is_shown_turn_by_turn() -> None:
    turns = Turns(lengths=(1, 2), rewards=(0.25,))
    one = completion(token_texts=["a", "b", "c"], credit=[0.5, -0.5, -0.5], turns=turns)
    assert one.turn_titles() == {0: "turn 1, reward 0.25", 1: "turn 2, reward 0.75"}
    page = render(step(one))
    assert page.index("turn 1, reward 0.25") < page.index("turn 2, reward 0.75")
    assert completion(token_texts=["a"], credit=[0.5], turns=Turns(lengths=(1,))).turn_titles() == {}
    console = Console(record=True, width=200)
    show(step(one), console, most=4)
    assert "[turn 2, reward 0.75]" in console.export_text()


def test_depth_follows_sign_size_and_share() -> None:
    scale = Scale(largest=2.0, low=0.5, high=1.5)
    strong, weak = scale.depths(np.array([1.0, 3.0])), scale.depths(np.array([0.1, 0.3]))
    assert strong[1] == pytest.approx(1.0)
    assert strong[0] < strong[1]
    assert np.all(weak < strong)
    np.testing.assert_allclose(scale.depths(np.array([-1.0, -3.0])), -strong)
    even = step(completion(token_texts=["a", "b"], credit=[1.0, 1.0])).scale()
    assert (even.depths(np.zeros(3)).any(), np.ptp(even.depths(np.ones(4)))) == (False, 0.0)
    nothing = step(completion(token_texts=["a"], credit=[0.0])).scale()
    assert nothing.depths(np.zeros(1)).tolist() == [0.0]


def test_terminal_view_neutralises_control_characters() -> None:
    stream = io.StringIO()
    shown = step(completion(token_texts=["a\x1b[2J", "b\n", "[red]x"], credit=[1.0, -1.0, 0.5], prompt="p\x07"))
    show(shown, Console(file=stream, force_terminal=False, width=100), most=4)
    text = stream.getvalue()
    assert not {"\x1b", "\x07"} & set(text)
    assert all(part in text for part in ("[red]x", "a+gtpo"))


def test_page_holds_every_token_with_its_numbers_and_no_script() -> None:
    page = render(step(completion(token_texts=["Wait", ",", HOSTILE], credit=[0.5, -0.25, 0.0], prompt=HOSTILE)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert 'title="token 1 | credit -0.250000 | log p -2.0000 | entropy 0.5000 | planning"' in page
    assert not re.search(r"src=|url\(|@import", page)
    assert re.findall(r'href="([^"]*)"', page) == ["#main", "#credit-1"]


def four() -> ShadedStep:
    """A group that was not trained on, and one that was, of a right and a wrong completion; one of them plans."""
    words, long = ["Wait", " so", " 4"], ["x" * 500, " y", "\n" + "z " * 40]
    return step(
        completion(token_texts=["4"], credit=[0.0], prompt="easy", group=0, trained=False),
        completion(token_texts=["4"], credit=[0.0], prompt="easy", group=0, index=1, trained=False),
        completion(token_texts=words, credit=[0.1, 0.9, 0.2], prompt="hard " * 30, group=1),
        completion(token_texts=long, credit=[-0.5, 0.0, -0.1], prompt="hard " * 30, group=1, index=1, reward=0.0),
    )


def test_trained_groups_come_first_and_each_prompt_stands_once() -> None:
    page = render(four())
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads == ["group 1 | 1 of 2 right", "group 0 | not trained | 2 of 2 right"]
    assert (page.count(("hard " * 30).strip()), page.count(">easy<")) == (1, 1)
    stream = io.StringIO()
    show(four(), Console(file=stream, width=200), most=3)
    shown = re.findall("^(?:group|hard hard|easy|completion) ?[0-9]?", stream.getvalue(), re.MULTILINE)
    hard, easy = ["group 1", "hard hard ", "completion 0", "completion 1"], ["group 0", "easy", "completion 0"]
    assert shown == hard + easy


def contrast(*colours: Sequence[float]) -> float:
    """Contrast of two colours by their relative luminance (WCAG 2)."""
    found = []
    for colour in colours:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)]
        found.append(float(np.dot([0.2126, 0.7152, 0.0722], linear)))
    return (max(found) + 0.05) / (min(found) + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_every_shade(scheme: int) -> None:
    block = own("style.css").split(":root")[2 + scheme].split("}")[0]
    named = {name: [*bytes.fromhex(code)] for name, code in re.findall(r"--(\w+): #(\w{6})", block)}
    shades = {name: np.fromstring(text, sep=",") for name, text in re.findall(r"--(\w+): ([\d, ]+);", block)}
    assert set(shades) == {"credit", "blame"}
    assert min(contrast(named[name], named["paper"]) for name in ("ink", "soft", "accent")) >= 4.5
    for name, deepest in shades.items():
        for depth in np.linspace(0.0, 1.0, 101):
            shade = depth * deepest + (1.0 - depth) * np.array(named["paper"])
            assert contrast(named["ink"], shade) >= 4.5, (name, depth)
        assert contrast(deepest, named["paper"]) > 1.3, "the shade differs from the page"


@needs_chromium
def test_a_phone_shows_it_without_sideways_scrolling_and_its_controls_work() -> None:
    """At 390 pixels: width, what each filter leaves, and a jump to a token that the filter hides."""
    found = in_frame(
        render(four()),
        """const page = view.document, at = id => page.getElementById(id);
        const shown = what => [...page.querySelectorAll(what)].filter(e => e.getClientRects().length).length;
        const count = () => [shown("article"), shown(".group")];
        const root = page.documentElement;
        const out = {width: [root.scrollWidth, root.clientWidth, view.innerWidth], all: count()};
        for (const id of ["right", "wrong"]) { at(id).click(); out[id] = count(); }
        at("all").click(); at("planning").click(); out.planning = count();
        const coloured = e => view.getComputedStyle(e).backgroundColor != "rgba(0, 0, 0, 0)";
        out.coloured = [...page.querySelectorAll("article.right .t")].filter(coloured).map(e => e.textContent);
        at("planning").click(); at("wrong").click();
        const link = page.querySelector("nav a"); link.focus();
        out.focused = page.activeElement.getAttribute("href"); link.click();
        const target = page.querySelector(":target");
        out.largest = [target.textContent, target.title, target.getClientRects().length > 0];
        return out;""",
        width_px=390,
    )
    assert found == {
        "width": [found["width"][0], found["width"][0], 390],
        "all": [4, 2],
        "right": [3, 2],
        "wrong": [1, 1],
        "planning": [2, 1],
        "coloured": [" so", " so"],
        "focused": "#credit-1",
        "largest": [" so", "token 1 | credit +1.800000 | log p -2.0000 | entropy 0.5000 | planning", True],
    }
