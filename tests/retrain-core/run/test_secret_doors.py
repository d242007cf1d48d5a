"""A secret planted in the environment leaves the process through none of its doors, whoever quotes it."""

import io
import json
import logging
import os
import sys
import threading
import traceback
from pathlib import Path

import pytest

from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.types import Example
from retrain.observe.trackers.recording import Recorders
from retrain.records.files import JsonLines, write_json, write_text
from retrain.run.interrupts import Interrupts
from retrain.tasks.scoring.failures import FailureRecord, read_failures, write_failures
from retrain.text.process import prepare_process, prepare_streams
from retrain.text.secrets import HIDDEN, LEARNED

SECRET = "sk-plantedPLANTED0123"
AWKWARD = 'pa"ss\\w<ö>rd&42 +/'  # written differently inside JSON, HTML and a URL
REWARD = """
import os, sys
class Reward:
    def __init__(self, context):
        pass
    def score(self, example, text):
        print("tried", os.environ["MY_SERVICE_KEY"], file=sys.stderr)
        if text.split()[:1] in (["1"], ["2"], ["3"]):
            raise PermissionError(f"401 for {os.environ['MY_SERVICE_KEY']} at https://me:login@host/")
        return float(text.split()[:1] == [example.reference])
    def gold(self, example):
        raise KeyError(os.environ["MY_SERVICE_KEY"])
"""


@pytest.fixture(autouse=True)
def _planted(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_KEY", SECRET)
    monkeypatch.setenv("AWKWARD_PASSWORD", AWKWARD)
    yield
    LEARNED.values.clear()


def test_no_file_and_no_output_of_a_run_holds_what_a_plugin_quotes(command, toys, tokenizer_folder, tmp_path):
    (tmp_path / "leaky.py").write_text(REWARD, encoding="utf-8")
    base = ["--model", str(tokenizer_folder), "--backend", "toy", "--data-source", "toy", "--seed", "1"]
    base += ["--reward-type", "leaky.Reward", "--scoring-max-failed-frac", "1", "--scoring-retries", "0"]
    base += ["--scoring-workers", "1"]
    base += ["--max-steps", "2", "--batch-size", "2", "--group-size", "8", "--max-tokens", "3"]
    base += ["--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll"]
    run = tmp_path / "logs" / "train"
    outputs = [
        command(*base, "--scoring-audit", "off", "--wandb-run-name", f"of {SECRET}"),
        command("audit", "--replay", str(run / "failures"), "--json"),
        command("audit", "--replay", str(run / "failures")),
        command("audit", *base, "--examples", "2"),
        command("audit", *base, "--examples", "2", "--json"),
        command("report", str(run)),
    ]
    assert [result.code for result in outputs] == [0, 1, 1, 1, 1, 0], [result.err for result in outputs]
    files = {file.name: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    shown = [(str(n), text.encode()) for n, result in enumerate(outputs) for text in (result.out, result.err)]
    for name, content in (*files.items(), *shown):
        assert SECRET.encode() not in content, name
        assert b"me:login" not in content, name
    for name in ("generations.jsonl", "report.html", "config.toml"):
        assert HIDDEN.encode() in files[name], name
    failed = [json.loads(text) for name, text in files.items() if name.startswith("step_") and name.endswith(".json")]
    assert failed
    assert all(f"401 for {HIDDEN}" in record["detail"] and HIDDEN in record["report"] for record in failed)


@pytest.mark.parametrize("secret", [SECRET, AWKWARD])
def test_the_writers_of_records_hide_it_in_any_form(secret, tmp_path):
    record = {"step": 1, "note": f"<{secret}>", secret: [{"deep": secret}], "x": 0.1, "n": 12345678901234567890}
    shown = {"step": 1, "note": f"<{HIDDEN}>", HIDDEN: [{"deep": HIDDEN}], "x": 0.1, "n": 12345678901234567890}
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write([record, {"step": 2}])
    lines.close()
    written = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(map(json.loads, written)) == [shown, {"step": 2}]
    write_json(tmp_path / "a.json", record)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == shown
    example = Example(id="e", prompt=f"p {secret}", reference="7", info={"key": secret})
    given = {"reward": "r", "weight": 1.0, "example": example, "attempts": 1, "seconds": 0.1}
    failure = FailureRecord(text=secret, detail=f"x{secret}", report=secret, **given)
    write_failures(tmp_path / "failures", "step_1", [failure])
    [(_, kept)] = read_failures(tmp_path / "failures")
    assert (kept.text, kept.detail, kept.report) == (HIDDEN, f"x{HIDDEN}", HIDDEN)
    assert (kept.example.prompt, kept.example.info) == (f"p {HIDDEN}", {"key": HIDDEN})


def test_pages_hide_it_in_the_escapes_of_html_and_urls(tmp_path):
    write_text(
        tmp_path / "a.html", "<b>pa&quot;ss\\w&lt;ö&gt;rd&amp;42 +/</b> ?k=pa%22ss%5Cw%3C%C3%B6%3Erd%2642%20%2B%2F"
    )
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == f"<b>{HIDDEN}</b> ?k={HIDDEN}"


def test_what_holds_no_secret_is_written_as_before(tmp_path, monkeypatch):
    not_secrets = {"A_TOKEN": "1234567890", "B_KEY": str(tmp_path), "TOKENIZER": "Qwen/Qwen2.5-0.5B"}
    not_secrets["RETRAIN__DATA__PROMPT_KEY"] = "question"
    for name, value in not_secrets.items():
        monkeypatch.setenv(name, value)
    record = {"model": "Qwen/Qwen2.5-0.5B", "x": 1234567890, "y": "1234567890 question", "z": str(tmp_path)}
    write_json(tmp_path / "a.json", record)
    assert (tmp_path / "a.json").read_text() == json.dumps(record, indent=2) + "\n"


def test_recorders_are_given_no_secret():
    given = []

    class Spy:
        def step(self, metrics):
            given.append(metrics)

        def start(self, manifest, folder):
            given.append(manifest)

    recorders = Recorders({"spy": Spy()})
    view = type("View", (), {"manifest": {"error": SECRET}, "folder": Path()})()
    recorders.retrain_run_start(view)
    recorders.retrain_step_end({"loss": 0.5, "note": f"by {SECRET}"})
    assert given == [{"error": HIDDEN}, {"loss": 0.5, "note": f"by {HIDDEN}"}]


def test_console_logs_and_tracebacks_hide_it(monkeypatch):
    files = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, file in files.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(file, encoding="utf-8", write_through=True))
    prepare_streams()
    print("key:", SECRET)
    assert print(AWKWARD, file=sys.stderr) is None
    logger = logging.getLogger("of_a_plugin")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.error("refused %s", SECRET)
    logger.removeHandler(handler)
    try:
        raise ValueError(SECRET)
    except ValueError:
        traceback.print_exc()
    assert files["stdout"].getvalue() == f"key: {HIDDEN}\n".encode()
    text = files["stderr"].getvalue().decode()
    assert text.startswith(f"{HIDDEN}\nrefused {HIDDEN}\nTraceback")
    assert text.endswith(f"ValueError: {HIDDEN}\n")


def test_the_last_words_of_a_run_that_does_not_stop_hide_it(monkeypatch):
    written = []
    left = threading.Event()
    monkeypatch.setattr(os, "write", lambda descriptor, content: written.append(content))
    monkeypatch.setattr(os, "_exit", lambda code: left.set())
    interrupts = Interrupts(grace_s=0.01)
    interrupts.fail(RewardError(Problem(what=f"refused with {SECRET}")))
    assert left.wait(30)
    assert written[0].startswith(f"refused with {HIDDEN}\nretrain: not stopped".encode())


def test_a_line_of_dotenv_that_a_variable_overrides_is_secret_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("MY_SERVICE_KEY=sk-of-the-file-0123\nOTHER_NAME=sk-no-secret-0123\n")
    prepare_process()
    monkeypatch.setenv("AAA_KEY", SECRET[:11])  # of two that begin alike the longer is replaced first
    write_text(tmp_path / "a", f"sk-of-the-file-0123 {SECRET} {SECRET[:11]} sk-no-secret-0123")
    monkeypatch.delenv("OTHER_NAME")
    assert (tmp_path / "a").read_text() == f"{HIDDEN} {HIDDEN} {HIDDEN} sk-no-secret-0123"


def test_a_key_of_the_configuration_is_known_but_a_marker_is_not(command, toys, tmp_path):
    key = "abc-1234567"
    command("explain", "--backend-opt", f"api_key={key}", "--data-opt", "stop_token=<|im_end|>", "--backend", "toy")
    write_text(tmp_path / "a", f"{key} <|im_end|>")
    assert (tmp_path / "a").read_text() == f"{HIDDEN} <|im_end|>"
