"""The page on Python and its notebook run as they stand, with the tiny model: marked `long` and `client`."""

from __future__ import annotations

import doctest
import json
import linecache
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import retrain
import retrain.facade.comparison
import retrain.facade.run
from tests.docs.reading import SITE, blocks

NOTEBOOK = SITE / "notebook.ipynb"
SETTINGS = {"training": {"max_steps": 40, "batch_size": 4, "group_size": 4, "max_tokens": 16, "seed": 1}}
CELLS = [
    f"import retrain\nconfig = {SETTINGS | {'model': {'model': 'builtin:tiny'}, 'data': {'source': 'arithmetic'}}}",
    "run = retrain.train(config, log_dir='logs/stopped')",
    "stopped = retrain.load('logs/stopped')\nbefore = (stopped.status, len(stopped.rows) < 40)\nrun = stopped.resume()",
    "never = retrain.train(config, log_dir='logs/never', quiet=True)",
    "same = run.metrics.filter(regex='(?<!time_s)$').equals(never.metrics.filter(regex='(?<!time_s)$'))",
    "print(before, same, type(run.metrics).__name__, len(run.metrics))",
    "print((run / 'adapter/final/adapter_model.safetensors').read_bytes() == "
    "(never / 'adapter/final/adapter_model.safetensors').read_bytes())",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from retrain.cli.command_line import run

    monkeypatch.chdir(tmp_path)
    assert run(["init", "--template", "tiny"]) == 0
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_and_the_docstrings_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(SITE / "python.md", "python")):
        file = f"<python.md {number}>"  # with its source, as a notebook keeps it
        monkeypatch.setitem(linecache.cache, file, (len(block), None, block.splitlines(keepends=True), file))
        exec(compile(block, file, "exec"), names)
    assert names["answers"]
    assert names["right"]
    assert [(entry["checkpoint"], entry["examples"]) for entry in names["scores"]] == [("base", 32), ("final", 32)]
    assert names["verdicts"] == ["cannot tell"]
    assert [names["run"].status, len(names["run"].rows)] == ["done", 8]
    assert "differs in more" not in str(names["comparison"])

    retrain.train("retrain.toml", max_steps=2, quiet=True)  # the run that the docstrings sample and compare
    finder, flags = doctest.DocTestFinder(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner, said = doctest.DocTestRunner(optionflags=flags), list[str]()
    for module in (retrain.facade.run, retrain.facade.comparison):
        for test in finder.find(module, globs={"retrain": retrain}):
            runner.run(test, out=said.append)
    assert runner.tries >= 4
    assert not runner.failures, "".join(said)


@pytest.mark.client
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.source: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    told = "\n".join(shown.values())
    assert "Run('logs/notebook', status='done')" in told
    assert "retrain: stopped by on_step; the state is saved. To continue: run = retrain.load('logs/stopped')" in told
    assert "stopped 4" in told
    assert shown[next(source for source in shown if "stopped.resume()" in source)].endswith("True")
    assert "['cannot tell']" in told
    assert "Traceback" not in told
    assert len(told) < 20_000, "a run does not flood its cell"


@pytest.mark.client
def test_the_interrupt_button_leaves_a_checkpoint_and_the_kernel_goes_on(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.cells[1].metadata["tags"] = ["raises-exception"]
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=place)

    def press() -> None:
        metrics, deadline = tmp_path / "logs/stopped/metrics.jsonl", time.monotonic() + 240
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.02)
        os.kill(int(json.loads((tmp_path / "logs/stopped/run.json").read_text())["pid"]), signal.SIGINT)

    button = threading.Thread(target=press, daemon=True)
    button.start()
    client.execute()
    button.join()
    stopped, compared, adapters = (text_of(notebook.cells[number]) for number in (1, 5, 6))
    assert "retrain: stopped by SIGINT; the state is saved" in stopped
    assert "Traceback" not in stopped
    assert stopped.count("[maxrl+gtpo_sepa] | ") <= 15, "one display, updated in place"
    assert compared.strip() == "('stopped', True) True DataFrame 40"
    assert adapters.strip() == "True"


def text_of(cell: Any) -> str:
    found = []
    for output in cell.outputs:
        found += ["\n".join(output.traceback)] if output.output_type == "error" else []
        found += [output.get("text") or output.get("data", {}).get("text/plain", "")]
    return "\n".join(filter(None, found)).strip()
