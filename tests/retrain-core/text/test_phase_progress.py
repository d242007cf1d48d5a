"""How far a phase has come: counts from many threads, rates and the time left, and text whatever the file says."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrain.kernel.contracts.context import PhaseProgress, PluginContext
from retrain.kernel.seeding import Seeds
from retrain.text import progress as phase_progress
from retrain.text.progress import phase_text, progress_of, progress_text
from retrain.text.tables import progress_bar


@pytest.fixture
def context(load, plugins):
    return PluginContext(config=load("")[0], seeds=Seeds(1), plugins=plugins)


@pytest.fixture
def after(monkeypatch):
    """`after(progress, 2.0)`: two seconds have passed since it began."""

    def set_clock(progress, seconds):
        monkeypatch.setattr(phase_progress.time, "monotonic", lambda: progress.started + seconds)

    return set_clock


def test_counts_of_several_threads_add_up_and_begin_resets_them():
    progress = PhaseProgress()
    progress.begin("completions", 4000, limit=8)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [progress.add(1, tokens=2, drawn=3) for _ in range(500)])
    assert (progress.done, progress.tokens, progress.drawn) == (4000, 8000, 12000)
    progress.begin("packs", 3)
    assert (progress.unit, progress.total, progress.limit) == ("packs", 3, 0)
    assert (progress.done, progress.tokens, progress.drawn) == (0, 0, 0)


def test_time_left_follows_from_tokens_or_from_the_share_that_is_done(context, after):
    sampling = context.sampling_progress
    sampling.begin("completions", 4, limit=100)
    after(sampling, 10.0)
    assert progress_of(context, "sampling", 0.0) == {"unit": "completions", "done": 0, "total": 4}
    sampling.add(drawn=80)  # 20 each: 320 of 400 are left, at 8 a second
    left = {"unit": "completions", "done": 0, "total": 4, "tokens": 80, "tokens_per_s": 8.0, "time_left_s": 40.0}
    assert progress_of(context, "eval", 0.0) == left
    sampling.add(2, tokens=40)  # two ended there: 160 are left
    assert progress_of(context, "sampling", 0.0) == left | {"done": 2, "time_left_s": 20.0}
    assert progress_of(context, "scoring", 0.0) == progress_of(context, "training", 0.0) == {}
    for progress, phase, limit in (
        (context.sampling_progress, "sampling", 100),
        (context.training_progress, "training", 0),
    ):
        progress.begin("things", 4, limit=limit)
        after(progress, 10.0)
        progress.add(1, tokens=50)
        shown = progress_of(context, phase, 0.0)
        counts = {"unit": "things", "done": 1, "total": 4, "tokens": 50}
        assert shown == counts | {"tokens_per_s": 5.0, "time_left_s": 30.0}


def test_what_is_complete_and_older_than_the_phase_is_not_shown(context):
    training = context.training_progress
    training.begin("packs", 2)
    training.add(1)
    assert progress_of(context, "training", training.started + 1.0), "overlapped: it began before the phase was entered"
    training.add(1)
    assert progress_of(context, "training", training.started + 1.0) == {}
    assert progress_of(context, "training", training.started)["done"] == 2


def test_the_text_of_a_phase():
    data = {"unit": "completions", "done": 12, "total": 32, "tokens": 5210, "tokens_per_s": 340.4, "time_left_s": 9.0}
    assert progress_text(data) == "12/32 completions, 5,210 tokens, 340 tokens/s, about 9.0 s left"
    assert phase_text("sampling", 3, 12.0, {}) == "sampling, step 3, for 12 s"
    assert phase_text("eval", -1, 12.0, {"done": 1, "total": 2}) == "eval, before training, for 12 s: 1/2"


@pytest.mark.parametrize(("term", "is_terminal"), [("xterm", False), ("dumb", True), ("unknown", True)])
def test_a_stream_that_cannot_be_redrawn_gets_one_line(term, is_terminal, monkeypatch, capsys):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_bar("merging \x1b[2J", PhaseProgress()):
        pass
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.strip().isprintable()


@pytest.mark.parametrize("is_colorless", [False, True])
def test_a_terminal_gets_a_bar_with_the_time_left(is_colorless, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)  # older rich takes an empty one for set
    if is_colorless:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = PhaseProgress()
    with progress_bar("merging", progress):
        progress.begin("tensors", 4)
        time.sleep(0.01)
        progress.add(1)
        print("result")
    shown = capsys.readouterr()
    assert shown.out == "result\n"  # stdout is left as it is
    assert "merging" in shown.err
    assert "25%" in shown.err
    assert "time left" in shown.err
    assert ("\x1b[36m" in shown.err) != is_colorless
