"""Inputs of a pack and planted secrets; a rerun as a user does it: compared, and a difference named with its cause."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import FOLDER, stored_identity, write_inputs
from retrain.records.identity.hashing import Budget, hash_file
from retrain.records.identity.recorded import with_places
from retrain.tools.pack.archive import Contents, open_pack, read_contents, write_pack
from retrain.tools.pack.comparison import (
    EVALUATED,
    RunLines,
    divergence,
    encoded,
    equivalence,
    expected_half_width,
    final_rates,
)
from retrain.tools.pack.environment import chosen_files, lay_out
from retrain.tools.pack.inputs import Inputs, collect_inputs, hidden, leaks_in
from retrain.tools.pack.pack_command import Curve, drawn_curves, page_of
from retrain.tools.pack.rerunning import LOOKED_AT, Difference, cause_lines, differences, ranked
from retrain.tools.pack.wheels import extras_of, installed_digests, pinned, required, wheel_of
from tests.end_to_end.running import Outcome, records, retrain, tiny
from tests.kit import packs
from tests.kit.problems import codes_in, refused


def test_lines_come_as_they_are_written_without_times_and_with_their_evaluation(tmp_path: Path) -> None:
    reader, metrics = RunLines(tmp_path), tmp_path / "metrics.jsonl"
    assert list(reader.new()) == []
    (tmp_path / "eval.jsonl").write_text('{"step": -1, "example": "a"}\n{"step": 5, "example": "a"}\n')
    metrics.write_text('{"step": -1, "x": 1, "eval_time_s": 0.3}\n{"step": 0, "x"')
    (first,) = reader.new()
    assert set(first) == {"step", "x", EVALUATED}
    with metrics.open("a") as stream:
        stream.write(': 2}\n{"step": 5, "x": 3}\n')
    second, third = reader.new()
    assert (second, third["x"]) == ({"step": 0, "x": 2}, 3)
    assert third[EVALUATED] != first[EVALUATED]
    assert [json.loads(encoded(line)) for line in RunLines(tmp_path).new()] == [first, second, third]
    with metrics.open("a") as stream:
        stream.write("[]\n")
    with pytest.raises(ConfigError, match=re.escape(str(metrics))):
        list(reader.new())


def test_the_first_divergence_names_both_values_and_ranks_causes_by_whether_numbers_only_round_otherwise() -> None:
    assert divergence("", {"step": 1, "a": 1.5}, {"step": 1, "a": 1.5}) is None
    found = divergence("r", {"step": 1, "a": 1.5, "b": 1}, {"step": 1, "a": 2.5, "c": 1})
    assert found is not None
    assert found.fields == {"a": (1.5, 2.5), "b": (1, None), "c": (None, 1)}
    assert found.lines()[:2] == ["first divergence: step 1 of r, 3 fields", "  a: 1.5 in the pack, 2.5 here"]
    ended = divergence("", {"step": 3}, None)
    assert ended is not None
    assert ended.lines() == ["first divergence: step 3: the rerun has no such line"]
    seed, package = Difference(kind="seed", what="was 1 and is now 2"), Difference(kind="package", what="numpy")
    far = divergence("", {"step": 0, "a": 1.0}, {"step": 0, "a": 2.0})
    near = divergence("", {"step": 0, "a": 1.0}, {"step": 0, "a": 1.0 + 1e-7})
    assert ranked([package, seed], far) == [seed, package]
    assert ranked([seed, package], near) == [package, seed]
    assert cause_lines([seed, package])[0] == "most likely cause: seed: was 1 and is now 2"
    assert cause_lines([package]) == ["cause: package: numpy"]
    assert LOOKED_AT in cause_lines([])[0]


def _rates(values: np.ndarray) -> dict[str, tuple[str, float]]:
    return {str(number): (str(number), float(value)) for number, value in enumerate(values)}


def test_equivalence_needs_the_same_examples_and_an_interval_inside_the_margin() -> None:
    half = _rates(np.full(50, 0.5))
    assert equivalence(half, half, 0.01).is_equivalent
    assert "not shown" in str(equivalence(half, _rates(np.full(50, 0.6)), 0.05))
    assert "could not be tested" in str(equivalence(half, {}, 0.5))
    assert "no spread" in str(equivalence(_rates(np.ones(1)), _rates(np.ones(1)), 0.5))
    records = [
        {"step": step, "set": "held_out", "example": "a", "cluster": "c", "correct": correct}
        for step, correct in ((-1, [True, True]), (9, [True, False]))
    ]
    assert final_rates(records) == {"a": ("c", 0.5)}


def test_a_true_difference_of_the_margin_is_called_equivalent_in_at_most_one_in_forty() -> None:
    rng, margin, called, trials = np.random.default_rng(1), 0.1, 0, 1000
    width = expected_half_width(_rates(np.full(100, 0.5)), 4)
    for _ in range(trials):
        packed, here = rng.binomial(4, 0.5, 100) / 4, rng.binomial(4, 0.5 - margin, 100) / 4
        called += equivalence(_rates(packed), _rates(here), margin).is_equivalent
    assert called / trials <= 0.025 + 0.015  # three standard errors of 1,000 trials
    spread = [float((rng.binomial(4, 0.5, (2, 100)).mean(axis=1) / 4) @ [1, -1]) for _ in range(2000)]
    assert width == pytest.approx(1.96 * np.std(spread), rel=0.1)


def test_a_wheel_is_made_of_what_is_installed_and_required_packages_are_pinned_without_the_label_of_a_build() -> None:
    wheel = wheel_of("retrain-sepa", "0.1.0", {"retrain_sepa"})
    assert wheel.file == "retrain_sepa-0.1.0-py3-none-any.whl"
    assert "retrain_sepa/plugin.py" in wheel.sources
    assert wheel.content == wheel_of("retrain-sepa", "0.1.0", {"retrain_sepa"}).content
    assert wheel_of("pluggy", "1", {"pluggy"}).sources.keys() >= {"pluggy/__init__.py", "pluggy/_hooks.py"}
    assert refused(wheel_of, "no-such-distribution", "1", {"x"}) == ["pack.no-install-record"]
    found = required({"retrain-core": ()})
    assert {"numpy", "pluggy", "transformers"} <= set(found)
    assert found.keys() < required({"retrain-core": ["wandb"]}).keys() | {"x"}
    assert extras_of("retrain-core", ["Wandb", "nothing"]) == ["wandb"]
    assert [pinned("torch", "2.13.0+cpu"), pinned("numpy", "2.4.6")] == ["torch==2.13.0", "numpy==2.4.6"]
    digests = [installed_digests(["numpy"])["numpy"]["digest"] for _ in range(2)]
    assert (len(digests[0]), digests[0] == digests[1]) == (32, True)


FINITE = st.floats(-1e12, 1e12)
EVIL = "<b>evil"
RUN = {"name": "", "place": "run", "condition": EVIL, "seed": 1, "steps": 2, "digest": "0a1b2c3d"}
MANIFEST: dict[str, Any] = {
    "kind": "run", "name": EVIL, "retrain": "0.1.0", "python": "3.11.7", "hardware": {}, "runs": [RUN],
    "model": {"name": "builtin:tiny", "num_files": 1, "digest": "0a"}, "wheels": {}, "placed": [], "left_out": [],
    "packages": {"numpy": {"version": "2.0", "digest": ""}}, "equivalence": None, "verdict": None,
}  # fmt: skip


@pytest.mark.parametrize(("steps", "has_curves"), [(2, True), (1, False)])
def test_results_over_steps_are_drawn_and_names_are_text(steps: int, has_curves: bool) -> None:
    lines = [{"step": step, "loss": 0.5 * step, "mean_reward": None} for step in range(steps)]
    metrics = "".join(json.dumps(line) + "\n" for line in lines).encode()
    members = {"run/run.json": b"{}", "run/metrics.jsonl": metrics, "config.toml": b"[model]\n"}
    page = page_of(MANIFEST, members, "p.rtpack")
    shown = [part in page for part in ("<polyline", "Too few steps to draw.", EVIL, "Mean reward")]
    assert shown == [has_curves, not has_curves, False, False]


@given(st.lists(st.tuples(st.integers(0, 10**6), FINITE), min_size=1, max_size=20), st.text(max_size=20))
@settings(max_examples=50)
def test_any_curve_drawn_inside_its_figure_and_any_label_escaped(points: list[tuple[int, float]], label: str) -> None:
    html = drawn_curves("t", [Curve(f"<b>{label}", points)]).__html__()
    assert not any(part in html for part in ("nan", "<b>"))


def recorded(run: Path, data: tuple[str, Path], weights: tuple[str, Path]) -> dict[str, Any]:
    """The `run.json` of a run in `run` that read these two files."""
    model = hash_file(*weights, Budget(), with_time=False, is_kept=False)
    identity = Identity(data=(hash_file(*data, Budget()),), model=(model,))
    run.mkdir()
    write_inputs(run, identity)
    record = {"seed": 1, "identity": identity.summary(), "config": {"data": {"path": data[0]}}}
    named = [(["data", "path"], "data", str(data[1])), (["model", "model"], "model", str(weights[1].parent))]
    entry = {"relative": "gone"}
    keys = [{**entry, "keys": keys, "sort": sort, "written": path, "absolute": path} for keys, sort, path in named]
    record["paths"] = {"keys": keys}
    (run / "run.json").write_text(json.dumps(record))
    return record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose data and model lie far from its folder."""
    far = tmp_path / "far"
    (far / "model").mkdir(parents=True)
    (far / "sums.jsonl").write_text("one\ntwo\n")
    (far / "model/w").write_bytes(bytes(2000))
    recorded(tmp_path / "run", (str(far / "sums.jsonl"), far / "sums.jsonl"), ("w", far / "model/w"))
    return tmp_path / "run"


def contents_of(run: Path) -> tuple[Contents, Inputs]:
    far, record = run.parent / "far", json.loads((run / "run.json").read_text())
    identity = with_places(stored_identity(run, record), record, run)
    tables = {"data": {"path": str(far / "sums.jsonl")}, "model": {"model": f"{far}/model"}}
    found = collect_inputs({"run": identity}, tables, most_bytes=1000, hide_secrets=False)
    members = {**packs.MEMBERS, **found.members, "run/run.json": json.dumps(record).encode()}
    members["identity.json"] = json.dumps(identity).encode()
    inputs = {name: getattr(found, name) for name in ("placed", "left_out", "moved")}
    runs = [{**packs.RUN, "identity": "identity.json"}]
    write_pack(run.parent / "p", packs.manifest(runs=runs, **inputs), members)
    return read_contents(open_pack(run.parent / "p")), found


def test_a_file_is_where_its_path_says_and_else_where_its_name_does(tmp_path: Path) -> None:
    files = {"sums.jsonl": {"path": "/far/sums.jsonl"}, "more.jsonl": {}}
    placed = with_places({"data": {"files": files}}, {}, tmp_path)["data"]["files"]
    assert {name: file["places"] for name, file in placed.items()} == {
        "sums.jsonl": ["/far/sums.jsonl"],
        "more.jsonl": ["more.jsonl"],
    }


def test_a_large_file_is_found_where_the_run_had_it_or_asked_for_and_all_is_laid_inside(run: Path) -> None:
    (contents, found), far, work = contents_of(run), run.parent / "far", run.parent / "work"
    assert [file["name"] for file in found.left_out] == ["w"]
    chosen = chosen_files(contents, {})
    assert chosen == {"outside/1/model/w": far / "model/w"}
    contents.opened.unpack(run.parent / "pack")
    lay_out(contents, run.parent / "pack", work, chosen)
    assert (work / "outside/1/model/w").read_bytes() == bytes(2000)
    assert (work / "outside/2/sums.jsonl").read_text() == "one\ntwo\n"
    (far / "model/w").write_bytes(bytes(1999) + b"x")
    with pytest.raises(ConfigError) as missing:
        chosen_files(contents, {})
    for name in ("w", "outside/1/model/w"):
        assert chosen_files(contents, {name: run}) == {"outside/1/model/w": run}
    with pytest.raises(ConfigError) as unknown:
        chosen_files(contents, {"w": run, "other": run})
    assert codes_in(missing) + codes_in(unknown) == ["rerun.file-missing", "rerun.unknown-file"]


def test_a_row_of_a_file_that_was_moved_and_other_weights_are_named(run: Path) -> None:
    (contents, _), again = contents_of(run), run.parent / "again"
    contents.opened.unpack(run.parent / "pack")
    (run.parent / "rows").write_text("one\n2\n")
    (run.parent / "other").write_bytes(b"other")
    recorded(again, ("outside/2/sums.jsonl", run.parent / "rows"), ("w", run.parent / "other"))
    found = differences(contents, contents.runs[0], run.parent / "pack" / FOLDER, again, {})
    assert [each.kind for each in found] == ["data", "model"]
    assert "rows:2 changed: 'two' is now '2'" in found[0].what
    assert "other changed" in found[1].what


OPENAI = "sk-proj-" + "a1B2c3D4" * 5
PLANTED = {
    f'client = OpenAI("{OPENAI}")': "form of a key",
    "token: hf_" + "aB3" * 12: "form of a key",
    "AKIA" + "ABCD1234" * 2: "form of a key",
    "url = 'https://me:pa55w0rd@host/x'": "login",
    'api_key = "k3y-0f-s0me-service"': "written out",
    '{"prompt": "x", "hf_token": "0123456789abcdef"}': "written out",
    "SERVICE_API_KEY=abc123def456": "written out",
    "GET /x?key=abc123def456": "written out",
    "-----BEGIN RSA PRIVATE KEY-----": "form of a key",
}
ORDINARY = (
    'api_key = os.environ["OPENAI_API_KEY_2"]',
    "api_key=settings.keys.openai_1",
    "def score(api_key: str = '') -> float:",
    'stop_token = "<|im_end|>"',
    'prompt_key = "question2answer"',
    "max_tokens = 12345678",
    "see https://host.example/path?a=1",
    "api_key = (hidden)",
    'pad_token = "<pad0>"',
    'api_key = "your-own-key-goes-here"',
    "password = getpass('Password 1: ')",
)


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_secret_is_found_and_hidden(line: str) -> None:
    text = f"first\n{line}\nlast\n".encode()
    (leak,) = leaks_in("code/x.py", text)
    assert (leak.file, leak.line, PLANTED[line] in leak.what) == ("code/x.py", 2, True)
    clean = hidden(text)
    assert (list(leaks_in("code/x.py", clean)), clean.count(b"\n")) == ([], 3)


def test_ordinary_code_is_no_secret() -> None:
    for line in (each.encode() for each in ORDINARY):
        assert (list(leaks_in("x.py", line)), hidden(line)) == ([], line)


def test_the_values_of_this_environment_are_found_even_in_binary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct horse battery")
    assert [leak.line for leak in leaks_in("x", b"\0\1 correct horse battery \0")] == [0]
    assert [leak.line for leak in leaks_in("x", b"a\nb correct horse battery")] == [2]
    assert b"horse" not in hidden(b"correct horse battery")


REWARD = '''"""A reward of our own."""


def credit(rewards):
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / 2 for reward in rewards]
'''
SHORT = ("--max-steps", "2", "--batch-size", "4", "--group-size", "8", "--eval-examples", "4", "-q")
OWN = ("--data-source", "files", "--data-path", "sums.jsonl", "--advantage-mode", "halved.credit")
VALUE = "correct-horse-battery-1"


def rows() -> list[str]:
    pairs = ((number, number % 5 + 2) for number in range(11, 41))
    return [json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) for a, b in pairs]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of its own code and data, in an environment that holds a secret, and its pack."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "plugins").mkdir()
    (folder / "plugins/halved.py").write_text(REWARD)
    (folder / "sums.jsonl").write_text("\n".join(rows()) + "\n")
    (folder / ".env").write_text(f"MY_SERVICE_TOKEN={VALUE}\n")
    tiny(*SHORT, *OWN, "--log-dir", "logs/run", "--set", f"logging.project=of {VALUE}", cwd=folder)
    outcome = retrain("pack", "logs/run", "-o", "run.rtpack", "--html", "run.html", cwd=folder)
    assert outcome.code == 0, outcome.err
    return folder


def again(packed: Path, into: Path, *arguments: str, file: str = "run.rtpack") -> Outcome:
    return retrain("rerun", file, "--here", "--into", str(into), *arguments, cwd=packed)


@pytest.mark.slow
def test_a_pack_holds_no_secret_and_the_same_bytes_each_time(packed: Path) -> None:
    with zipfile.ZipFile(packed / "run.rtpack") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert members["inputs/code/plugins/halved.py"].decode() == REWARD
    assert not [name for name, content in members.items() if VALUE.encode() in content]
    page = (packed / "run.html").read_text()
    assert VALUE not in page
    assert "<script" not in page
    assert retrain("pack", "logs/run", "-o", "other.rtpack", cwd=packed).code == 0
    assert (packed / "other.rtpack").read_bytes() == (packed / "run.rtpack").read_bytes()
    refused = retrain("pack", "logs/run", "-o", "other.rtpack", cwd=packed)
    assert (refused.code, codes_in(refused.err)) == (2, ["pack.file-exists"])


@pytest.mark.slow
def test_code_that_has_changed_or_holds_a_key_is_refused_by_file_and_line(packed: Path, tmp_path: Path) -> None:
    own = packed / "plugins/halved.py"
    copy = packed / "logs/run/inputs/code/plugins/halved.py"
    kept = copy.read_text()
    try:
        own.write_text(REWARD.replace("/ 2", "/ 3"))
        copy.unlink()
        outcome = retrain("pack", "logs/run", "-o", str(tmp_path / "p"), cwd=packed)
        assert (outcome.code, codes_in(outcome.err)) == (2, ["pack.file-changed"])
    finally:
        own.write_text(REWARD)
        copy.write_text(kept)
    assert not (tmp_path / "p").exists()


@pytest.mark.slow
def test_the_rerun_is_identical(packed: Path, tmp_path: Path) -> None:
    same = again(packed, tmp_path / "same", "--yes", "--json")
    assert same.code == 0, same.out + same.err
    (run,) = json.loads(same.out)["runs"]
    assert (run["verdict"], run["same_lines"], run["causes"]) == ("identical", 3, [])


@pytest.mark.long
def test_a_changed_row_is_named_at_the_first_line_that_differs(packed: Path, tmp_path: Path) -> None:
    seen = records(packed / "logs/run/emergence/generations.jsonl")[-1]["prompt"]  # of the second step
    other = rows()
    number = next(number for number, row in enumerate(other) if json.loads(row)["prompt"] in seen)
    other[number] = json.dumps({"prompt": "What is 10 + 10?", "answer": "20"})
    (tmp_path / "other.jsonl").write_text("\n".join(other) + "\n")
    changed = again(packed, tmp_path / "row", "--yes", "--json", "--data", f"sums.jsonl={tmp_path / 'other.jsonl'}")
    (run,) = json.loads(changed.out)["runs"]
    assert changed.code == 1
    assert run["causes"][0]["kind"] == "data"
    assert f"sums.jsonl:{number + 1} changed" in run["causes"][0]["what"]
    assert (run["same_lines"], run["first_divergence"]["step"]) == (2, 1)


@pytest.mark.long
def test_another_seed_and_other_code_are_named_and_a_declared_test_decides(packed: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.rtpack"
    assert retrain("pack", "logs/run", "-o", str(wide), "--equivalence", "0.9", cwd=packed).code == 0
    seed = again(packed, tmp_path / "seed", "--yes", "--json", "--set", "training.seed=7", file=str(wide))
    (run,) = json.loads(seed.out)["runs"]
    assert run["causes"] == [{"kind": "seed", "what": "was 1 and is now 7"}]
    assert (seed.code, run["verdict"], run["equivalence"]["equivalent"]) == (0, "equivalent", True)
    (tmp_path / "halved.py").write_text(REWARD.replace("/ 2", "/ 3"))
    code = again(packed, tmp_path / "code", "--yes", "--json", "--data", f"plugins/halved.py={tmp_path / 'halved.py'}")
    (run,) = json.loads(code.out)["runs"]
    assert (code.code, run["verdict"], run["causes"][0]["kind"]) == (1, "different", "code")
    assert "halved.py:6 changed" in run["causes"][0]["what"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_clean_environment_repeats_the_run_and_another_package_in_it_is_named(packed: Path, tmp_path: Path) -> None:
    def rerun(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(script), "rerun", "run.rtpack", "--yes", *options]
        return subprocess.run(command, cwd=packed, capture_output=True, text=True, timeout=5000, check=False)

    done = rerun(Path(sys.executable).with_name("retrain"), "--into", str(tmp_path / "x"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: 3 of 3 lines are the same, and the weights" in done.stdout
    (site,) = (tmp_path / "x/environment").glob("lib/python*/site-packages")
    (metadata,) = site.glob("numpy-*.dist-info/METADATA")
    metadata.write_text(re.sub(r"^Version: .*", "Version: 99.1", metadata.read_text(), count=1, flags=re.MULTILINE))
    variance = site / "numpy/_core/_methods.py"
    exact = variance.read_text().replace("def _var(", "def _var_exact(", 1)
    variance.write_text(f"{exact}\n\ndef _var(*args, **named):\n    return _var_exact(*args, **named) * (1 + 1e-9)\n")
    second = rerun(tmp_path / "x/environment/bin/retrain", "--here", "--json", "--into", str(tmp_path / "y"))
    (run,) = json.loads(second.stdout)["runs"]
    assert run["causes"][0]["kind"] == "package"
    assert "numpy was" in run["causes"][0]["what"]
    assert run["first_divergence"]["step"] == 0
