"""`retrain eval`: a run gets its own figures again, a stopped evaluation goes on, and what cannot be evaluated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.run import opened
from retrain.use.evaluate import subjects
from tests.kit.problems import codes_in
from tests.kit.shared import made_once

Command = Callable[..., Any]
Read = Callable[[Path], list[dict[str, Any]]]
SETS = '{"more": {"options": {"count": 40}, "examples": 10, "samples": 3, "temperature": 0.5}}'


@pytest.fixture
def run(command: Command, near_arguments: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the toys, with held-out examples and a further set, evaluated every two."""

    def make(folder: Path) -> None:
        evals = ("--eval-examples", "4", "--eval-samples", "2", "--eval-every", "2", "--eval-sets", SETS)
        steps = ("--max-steps", "4", "--save-every", "2", "--keep-best", "1", "--log-dir", str(folder / "run"))
        done = command(*near_arguments, *evals, *steps)
        assert done.code == 0, done.err

    shutil.copytree(made_once(tmp_path_factory, "near-eval", make) / "run", tmp_path / "run")
    return tmp_path / "run"


def results(command: Command, *arguments: str) -> list[dict[str, Any]]:
    done = command("eval", *arguments, "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["results"]
    return found


def test_a_run_gets_the_figures_of_its_own_evaluations_to_the_sample(command: Command, run: Path, lines: Read) -> None:
    metrics = {line["step"]: line for line in lines(run / "metrics.jsonl")}
    own = lines(run / "eval.jsonl")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    found = results(command, "run", "--checkpoint", "all")
    assert [(each["steps"], each["set"]) for each in found] == [(n, s) for n in (2, 4) for s in ("held_out", "more")]
    for each in found:
        line, prefix = metrics[each["steps"] - 1], "eval_" if each["set"] == "held_out" else "eval_more_"
        for name in ("correct_rate", "ci_low", "ci_high", "mean_reward", "pass_at_1", "pass_at_2", "examples"):
            assert each[name] == line[f"{prefix}{name}"], name
        recorded = lines(Path(each["file"]))[1:]
        assert recorded == [x for x in own if (x["step"], x["set"]) == (each["steps"] - 1, each["set"])]
        assert each["own"]["same_as_run"] == each["own"]["of"] == line[f"{prefix}examples"] * line[f"{prefix}samples"]
    assert {file: file.read_bytes() for file in before} == before, "an evaluation changes nothing of its run"

    best = max(metrics[step]["eval_correct_rate"] for step in (1, 3))
    (chosen,) = results(command, "run", "--checkpoint", "best", "--eval-set", "held_out")
    assert chosen["correct_rate"] == best
    shown = command("eval", "run")
    assert "38 samples equal the run's own evaluation at that step." in shown.out
    assert "run (final)" in shown.out
    (other,) = results(command, "run", "--eval-set", "more", "--eval-seed", "5")
    assert other["own"] is None, "with another seed it is another evaluation"


def test_a_stopped_evaluation_goes_on_with_the_same_samples(
    command: Command, run: Path, lines: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    evaluate = subjects.evaluate

    def stopped(each: Any, prompts: Any, *arguments: Any, **named: Any) -> Any:
        drawn.append(len(prompts))
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return evaluate(each, prompts, *arguments, **named)

    monkeypatch.setattr(subjects, "evaluate", stopped)
    assert command("eval", "run", "--out", "parts", "--save-every", "3").code != 0
    (half,) = (tmp_path / "parts").rglob("more-*.jsonl")
    assert drawn == [3, 1, 3, 3]
    assert len(lines(half)) == 1 + 3
    whole = half.read_bytes()
    half.write_bytes(whole[:-20])  # as a full disk or a power failure leaves it
    found = results(command, "run", "--out", "parts", "--save-every", "3")
    assert drawn[4:] == [3, 3, 3, 1], "of a torn portion nothing is kept, of others all"
    own = [line for line in lines(run / "eval.jsonl") if line["step"] == 3]
    assert [line for each in found for line in lines(Path(each["file"]))[1:]] == own
    assert half.read_bytes().startswith(whole)
    assert results(command, "run", "--out", "parts", "--save-every", "3") == found
    assert len(drawn) == 8, "what is there is read, not sampled again"
    half.write_bytes(whole[:30])
    assert results(command, "run", "--out", "parts", "--save-every", "3") == found, "not even its first line was whole"
    half.write_text("{}\n")
    refused = command("eval", "run", "--out", "parts")
    assert refused.code == 2
    assert "eval.other-record" in codes_in(refused.err)


@pytest.mark.long
def test_other_data_and_several_subjects_in_one_table(command: Command, run: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"so {n} plus {n} ?", "answer": str(2 * n % 10)} for n in range(6)]
    (tmp_path / "my tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    flags = ("--data", "my tasks.jsonl", "--reward", "near", "--samples", "2", "--examples", "4")
    done = command("eval", "run", "run/adapter/checkpoint_step_2", *flags)
    assert done.code == 0, done.err
    assert done.out.count("my_tasks") == 2
    assert done.out.count("4 x 2") == 2
    assert "use `retrain compare`" in done.out
    assert {file.parent.name for file in run.glob("evaluations/*/my_tasks-*.jsonl")} == {"final", "checkpoint_step_2"}
    (tmp_path / "sets.toml").write_text('[eval.sets.words]\nsource = "files"\npath = "my tasks.jsonl"\n')
    found = results(command, "run", "--config", "sets.toml")
    assert [each["set"] for each in found] == ["held_out", "more", "words"], "they join those of the run"
    (by_source,) = results(command, "run", "--data", "toy")
    assert (by_source["set"], by_source["examples"]) == ("toy", 4), "a source by its name, without what is trained on"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "nothing to evaluate is named"),
        (("run", "--eval-set", "mor"), "did you mean 'more'?"),
        (("run", "--greedy"), "--greedy: needs --data"),
        (("run", "--samples", "2"), "write --eval-samples"),
        (("run", "--eval-examples", "0", "--eval-sets", "{}"), "there is nothing to evaluate on"),
        (("run", "--eval-examples", "5"), "5 held-out examples wanted, but the run held out 4"),
        (("run", "--eval-seed", "9"), "is 9, and the run held out its examples with 0"),
        (("run", "--data", "toy", "--examples", "99"), "--data examples: 99 examples wanted, but the set has 4"),
        (("run", "--data", "missing.jsonl", "--reward", "near"), "no such file or folder: 'missing.jsonl'"),
        (("run", "--checkpoint", "7"), "there is no checkpoint '7'"),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    arguments: tuple[str, ...], expected: str, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "build_backend", None)  # all of it before the model loads
    done = command("eval", *arguments)
    assert done.code == 2
    assert expected in done.err
    assert not (run / "evaluations").exists()


def test_the_commands_of_others_are_printed(command: Command, run: Path) -> None:
    shown = command("eval", "run", "--checkpoint", "best", "--to", "lm-eval")
    assert shown.code == 0, shown.err
    assert "retrain serve run --checkpoint best --name policy" in shown.out
    assert "lm_eval --model local-completions --model_args model=policy,base_url=http://127.0.0.1:8000/v1/" in shown.out
    assert "--model openai-api/retrain/policy" in command("eval", "run", "--to", "inspect").out
    assert command("eval", "run", "--checkpoint", "7", "--to", "inspect").code == 2


@pytest.mark.long
def test_a_model_alone_is_evaluated_on_what_flags_name(command: Command) -> None:
    pytest.importorskip("torch")
    flags = ("--data", "arithmetic", "--reward", "match", "--examples", "3", "--greedy", "--max-tokens", "32")
    (bare,) = results(command, "builtin:tiny", *flags)
    assert (bare["run"], bare["examples"], bare["samples"]) == (None, 3, 1)
    assert Path(bare["file"]).is_relative_to("logs/evaluations/builtin_tiny")
