"""The GPU proof without a GPU: its parts survive being cut off, go on where they ended, and fill the page."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.end_to_end.running import is_running
from tests.kit.carried_wheel import MODULE, write_wheel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Prints the figures that it is asked for and lacks; "hang" starts a child that would outlive it, "fail" is a failure.
WORKER = """
import json, os, subprocess, sys
settings = json.load(open(sys.argv[1]))
for name in settings["do"]:
    if name == "hang" and not os.path.exists(settings["pids"]):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(settings["pids"], "w").write(str(child.pid))
        child.wait()
    if name == "fail":
        sys.exit("this part is broken")
    if name not in settings["had"]:
        print("figure " + json.dumps({name: {"had": settings["had"]}}), flush=True)
"""


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("harness.proof")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def parts(proof: Any, folder: Path, limit_s: float = 60, **do: list[str]) -> list[Any]:
    command = [sys.executable, "-c", WORKER]
    pids = str(folder / "child")
    return [
        proof.Part(name=name, command=command, settings={"do": each, "pids": pids}, limit_s=limit_s)
        for name, each in do.items()
    ]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_part_that_was_cut_off_keeps_its_figures_and_goes_on_after_them(proof: Any, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    plan = parts(proof, tmp_path, 3, one=["a", "hang", "b"], broken=["c", "fail"], two=["d"])
    left = proof.Proof.opened(file, {"card": "first"}).run(plan, tmp_path / "work", 100, time.monotonic)
    assert left == ["one", "broken"]
    found = json.loads(file.read_text())["parts"]
    assert {name: part["status"] for name, part in found.items()} == {
        "one": "cut off",
        "broken": "failed",
        "two": "done",
    }
    assert [list(part["figures"]) for part in found.values()] == [["a"], ["c"], ["d"]]
    assert "this part is broken" in found["broken"]["output"]
    assert not is_running(int((tmp_path / "child").read_text())), "what a part started ends with it"
    again = proof.Proof.opened(file, {"card": "second"})
    assert [part.name for part in again.order(plan)] == ["one", "broken"]
    assert again.run(plan, tmp_path / "work", 100, time.monotonic) == ["broken"]
    document = json.loads(file.read_text())
    assert document["card"] == "second"
    assert document["parts"]["one"]["figures"]["b"] == {"had": ["a"]}
    assert document["parts"]["one"]["seconds"] > found["one"]["seconds"]


def test_nothing_is_started_that_the_time_does_not_allow(proof: Any, tmp_path: Path) -> None:
    now = iter([0.0, 0.0, 85.0, 90.0])  # the first part takes 85 seconds
    plan = parts(proof, tmp_path, first=["a"], second=["b"])
    opened = proof.Proof.opened(tmp_path / "gpu.json", {})
    assert opened.run(plan, tmp_path / "work", 100, lambda: next(now)) == ["second"]
    assert list(opened.parts) == ["first"]


def test_a_proof_that_is_killed_has_its_figures_on_disk(proof: Any, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    script = (
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from pathlib import Path; from harness.proof import Part, Proof\n"
        f"settings = {{'do': ['a', 'hang'], 'pids': {str(tmp_path / 'child')!r}}}\n"
        f"part = Part(name='one', command=[sys.executable, '-c', {WORKER!r}], settings=settings, limit_s=60)\n"
        f"Proof.opened(Path({str(file)!r}), {{}}).run([part], Path({str(tmp_path)!r}), 100, time.monotonic)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    part = json.loads(file.read_text())["parts"]["one"]
    assert (part["status"], list(part["figures"])) == ("cut off", ["a"])
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # the part, which waited for it, ends by itself


def test_the_plan_measures_what_is_promised_and_every_test_that_needs_a_gpu(gpu: Any) -> None:
    plan = {part.name: part for part in gpu.plan("cuda")}
    assert len(plan) == len(gpu.plan("cuda")), "each name stands for one part"
    assert plan["decode 4B"].settings["sizes"][0] == [8, 16, 1024]
    files = plan["tests"].settings["files"]
    assert {Path(file).name for file in files} >= {"test_gpu.py", "test_gpu_attention.py", "test_paged_triton.py"}
    assert all((BENCHMARKS.parent / file).is_file() for file in files)


# What a machine with PyTorch, transformers, PEFT and pytest has of the requirements of ours and of what is carried.
BROUGHT = """
anyio click filelock fsspec h11 httpx huggingface-hub jinja2 markdown-it-py markupsafe narwhals numpy packaging pandas
peft pluggy pyarrow python-dateutil pyyaml requests rich safetensors scipy sympy threadpoolctl tokenizers torch tqdm
transformers xxhash zipp
"""


def test_wheels_are_carried_for_all_that_such_a_machine_lacks(gpu: Any) -> None:
    carried = {canonicalize_name(name.partition("==")[0]) for name in (*gpu.CARRIED, *gpu.OURS)}
    for name in carried:
        needs = [Requirement(line) for line in metadata.requires(name) or []]
        plain = {canonicalize_name(one.name) for one in needs if not one.marker or one.marker.evaluate({"extra": ""})}
        assert plain <= carried | set(BROUGHT.split()), name


def test_carried_wheels_reach_test_processes(tmp_path: Path) -> None:
    file, kept = tmp_path / "test_carried.py", tmp_path / "kept"
    file.write_text(
        f"def test_one():\n    import {MODULE}\n    from importlib.metadata import version\n    version('{MODULE}')"
    )
    # as tests/conftest.py does: it removes the folders of PYTHONPATH
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    script = tmp_path / "gpu_with_one_test.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\nimport gpu\n"
        f"gpu.gpu_tests = lambda: [{str(file)!r}]\ngpu.main()\n"
    )
    carried = ["--carried", str(write_wheel(tmp_path / "wheels")), "--folder", str(kept), "--json", str(kept / "copy")]
    subprocess.run([sys.executable, str(script), "--device", "cpu", "--parts", "tests", *carried], check=False)
    figure = json.loads((kept / "copy").read_text())["parts"]["tests"]["figures"][str(file)]
    assert figure.get("passed") == 1, figure["output"]
    installed = kept / "carried/installed"
    before_ns = installed.stat().st_mtime_ns
    subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py"), "--report", *carried], check=True)
    assert installed.stat().st_mtime_ns == before_ns, "the same wheels are installed once"


def test_a_limit_counts_a_shared_prompt_once_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    limits = importlib.import_module("harness.limits")
    sizes = {"layers": 2, "hidden": 8, "inner": 16, "heads": 2, "kv_heads": 1, "head_size": 4, "vocabulary": 32}
    shape = limits.Shape(**sizes)
    apart, shared = (limits.Work(rows=8, group=group, prompt=100, new=10) for group in (1, 4))
    saved = limits.decode(shape, apart, 2).moved_bytes - limits.decode(shape, shared, 2).moved_bytes
    assert saved == (8 - 2) * 100 * 10 * shape.kv_bytes(2)  # prompts fewer, their tokens, token steps
    assert limits.prefill(shape, apart, 2).operations == 4 * limits.prefill(shape, shared, 2).operations
    rows = [(100, 10)] * 8
    trained = [limits.training(shape, rows, 4, 2, groups=groups).operations for groups in (8, 2)]
    assert trained == [limits.training(shape, rows, 4, 2).operations, pytest.approx(trained[1])]
    prompts = limits.training(shape, [(100, 0)], 4, 2).operations
    assert trained[0] - trained[1] == pytest.approx(6 * prompts)


def test_a_copy_follows_the_figures_and_stands_in_for_a_folder_that_is_gone(proof: Any, tmp_path: Path) -> None:
    file, copy = tmp_path / "kept/gpu.json", tmp_path / "out/gpu.json"
    plan = parts(proof, tmp_path, one=["a"], two=["b"])
    for part in plan:  # a call for each, and the folder of the copy is emptied between them
        proof.Proof.opened(file, {}, copy).run([part], tmp_path / "work", 100, time.monotonic)
        assert copy.read_bytes() == file.read_bytes()
        shutil.rmtree(copy.parent)
    assert set(json.loads(file.read_text())["parts"]) == {"one", "two"}
    shutil.copytree(file.parent, copy.parent)
    shutil.rmtree(file.parent)
    assert set(proof.Proof.opened(file, {}, copy).parts) == {"one", "two"}


STEP = {"step_s": [9.5], "sample_s": [6.0], "train_s": [3.0], "sample_limit_s": 2.0, "train_limit_s": 1.0}
PARTS: dict[str, dict[str, Any]] = {
    "tests": {
        "a.py": {
            "exit_code": 1,
            "passed": 3,
            "failed": 1,
            "skipped": 2,
            "not_passed": ["FAILED a.py::test_x - assert 1 == 2", "SKIPPED [2] a.py:3: no second GPU"],
        }
    },
    "decode 4B": {
        "128 x 1024": {"step_ms": 5.0, "least_ms": 4.0, "weights_ms": 3.0, "fraction": 0.8},
        "kernels": {
            "wall_s": 2.0,
            "kernel_s": 1.5,
            "launches": 30,
            "kernels": [[0.8, 10, "nvjet_tst"], [0.5, 10, "attend"], [0.2, 10, "_draw"]],
        },
    },
    "train 4B": {
        "step": {"step_s": [3.0], "tflop": 1000.0, "mfu": 0.41},
        "kernels": {"wall_s": 1.0, "kernel_s": 1.0, "launches": 9, "kernels": [[0.5, 5, "gemm"], [0.5, 4, "_swiglu"]]},
    },
    "step 4B": {"step": {**STEP, "times_the_limit": 3.33}},
    "step 4B, TRL": {"step": {"step_s": [47.5], "first_s": 60.0}},
}


def test_the_page_has_tests_fractions_kernels_and_the_next_three_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_page = importlib.import_module("harness.gpu_page")
    where = {"versions": {}, "card": "H100", "commit": "c", "date": "d", "load_at_start": 0.0, "small": False}
    found = gpu_page.page(where, {name: {"status": "done", "figures": each} for name, each in PARTS.items()})
    lines = found.splitlines()
    assert "| tests | 1 files | 3 passed, 1 failed, 2 skipped |  |  | all pass |" in lines
    assert "| decode 4B | 128 x 1024 | 5.00 ms a token step | 4.00 ms | 80% of bandwidth | 60 % |" in lines
    assert "| train 4B | step | 3.00 s | 1000 Tflop | 41% MFU | 45 % |" in lines
    assert "| step 4B, TRL | step | 47.50 s |  | 5.00 x ours |  |" in lines
    assert "| decode 4B | `attend` | 500.0 ms, 10 launches |  | 25% |  |" in lines
    assert [line for line in lines if line.startswith("- ")] == [
        "- FAILED a.py::test_x - assert 1 == 2",
        "- 2 skipped: no second GPU",
    ]
    assert [line for line in lines if line[:2] in ("1.", "2.", "3.")] == [
        # of 6 s of sampling: a quarter without a kernel; attention 1.5 s where a quarter of 2 s is its limit
        "1. training: `_swiglu`: 1.50 s, 16% of a step of 4B",
        "2. decoding: the GPU waits for the host: 1.50 s, 16% of a step of 4B",
        "3. decoding: attention above the limit: 1.00 s, 11% of a step of 4B",
    ]
    assert "mean nothing" not in found
    assert "mean nothing" in gpu_page.page(
        {**where, "small": True}, {"step 4B": {"status": "done", "figures": PARTS["step 4B"]}}
    )


@pytest.mark.parametrize(
    ("code", "said", "is_passed"),
    [(0, "31 skipped", False), (1, "1 failed, 30 passed", False), (0, "2 passed, 29 skipped", True), (5, "", True)],
)
def test_the_part_of_the_tests_is_done_when_tests_passed(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, said: str, is_passed: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "workers"))
    worker = importlib.import_module("gpu_part")
    done = subprocess.CompletedProcess([], code, stdout=f"SKIPPED [1] a.py:3: why\n{said} in 1.00s")
    monkeypatch.setattr(worker.subprocess, "run", lambda *_, **__: done)
    file = "tests/test_one.py"
    ending = nullcontext() if is_passed else pytest.raises(SystemExit, match=file)
    with ending:
        worker.tests({"files": [file]}, worker.Figures([]))
    figure = json.loads(capsys.readouterr().out.removeprefix("figure "))[file]
    assert (figure["ok"], figure["not_passed"]) == (is_passed, ["SKIPPED [1] a.py:3: why"])


def test_a_figure_that_is_not_ok_is_measured_again(proof: Any, tmp_path: Path) -> None:
    show = "import json, sys; print('figure ' + json.dumps({'had': json.load(open(sys.argv[1]))['had']}))"
    part = proof.Part(name="tests", command=[sys.executable, "-c", show], settings={}, limit_s=60)
    before = {"figures": {"passed": {"ok": True}, "broken": {"ok": False}, "rate": {"ms": 1}}, "seconds": 0.0}
    opened = proof.Proof(file=tmp_path / "gpu.json", machine={}, parts={"tests": before})
    assert opened.run([part], tmp_path, 100, time.monotonic) == []
    assert opened.parts["tests"]["figures"]["had"] == ["passed", "rate"]


def test_without_a_gpu_the_command_says_so_and_makes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--folder", str(tmp_path / "models")]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    assert "--device cpu" in done.stderr
    assert list(tmp_path.iterdir()) == []
