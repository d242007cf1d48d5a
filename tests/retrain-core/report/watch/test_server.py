"""The server: for this machine and for who knows the token, read-only; and what a look reads of a growing file."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.report import watch_server as module
from retrain.report.commands import watch as command
from retrain.report.watch_server import HEADERS, Tail, WatchServer
from retrain.verdicts.ledger.looks import InterimLooks
from tests.kit import made_runs
from tests.kit.invoke import invoke
from tests.kit.problems import codes_in

Watch = Callable[[Path], WatchServer]
MakeRun = Callable[..., Path]


def answer(server: WatchServer, path: str, *, method: str = "GET", host: str = "") -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request(method, path, headers={"Host": host or server.hosts[0]})
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, response.headers, content


def asked(server: WatchServer, what: str) -> Any:
    status, _, content = answer(server, f"/{server.token}/{what}")
    assert status == 200
    return json.loads(content)


def test_only_who_knows_the_address_gets_anything_and_nothing_changes(watched_run: MakeRun, watch: Watch) -> None:
    server = watch(watched_run())
    assert server.host == "127.0.0.1"
    assert len(server.token) >= 24
    page = f"/{server.token}/"
    assert answer(server, page)[0] == 200
    assert answer(server, page, host=server.hosts[1])[0] == 200
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1.evil:{server.port}"):
        assert answer(server, page, host=host)[::2] == (404, "Not found.\n"), host
    tokens = (f"/{server.token[:-1]}/", f"/{server.token}x/")
    for path in ("/", "/x/", *tokens, f"{page}../run.json", f"{page}run.json", "/%00"):
        assert answer(server, path)[::2] == (404, "Not found.\n"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert answer(server, page, method=method)[0] == 501
    status, headers, content = answer(server, page, method="HEAD")
    assert (status, content) == (200, "")
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_the_page_gets_the_rows_that_it_lacks_and_how_the_run_stands(watched_run: MakeRun, watch: Watch) -> None:
    folder = watched_run(steps=6)
    beat = {"pid": json.loads((folder / "run.json").read_text())["pid"], "phase": "sampling\x1b", "step": 6}
    (folder / "heartbeat.json").write_text(json.dumps(beat | {"progress": {"done": 1, "total": "x", "unit": "\u202e"}}))
    server = watch(folder)
    first = asked(server, "data?generation=0&rows=0")
    assert [row["step"] for row in first["rows"]] == [-1, 0, 1, 2, 3, 4, 5]
    assert (first["newest_step"], first["status"]["condition"], first["charts"]) == (5, "maxrl+none", [])
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "correct_rate": 1.0}\n')
    then = asked(server, f"data?generation={first['generation']}&rows={len(first['rows'])}")
    assert (then["first"], then["rows"]) == (7, [{"step": 6, "correct_rate": 1.0}])
    for nonsense in ("data", "data?rows=-1&generation=x", "data?rows=9999999", "data?rows=1e9&generation=1"):
        assert len(asked(server, nonsense)["rows"]) == 8
    named = {"reward_ma\x1bth_mean": 0.5, "eval_hard_correct_rate": 0.25, "eval_time_s": 1.0, "step": 7}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(named) + "\n")
    charts = asked(server, "data")["charts"]
    assert [(chart["title"], chart["fields"]) for chart in charts] == [
        ("hard", ["eval_hard_correct_rate"]),
        ("Part ma[U+001B]th", ["reward_ma\x1bth_mean"]),
    ]
    shutil.rmtree(folder)
    gone = asked(server, "data?generation=0&rows=0")
    assert (gone["status"], gone["newest_step"], len(gone["rows"])) == ({"status": "gone"}, None, 9)
    assert asked(server, "completions?step=0")["items"] == []


def test_completions_are_given_a_few_at_a_time_by_what_became_of_them(watched_run: MakeRun, watch: Watch) -> None:
    hostile = "<script>alert(1)</script>\n\x1b[2J\u202e"
    server = watch(watched_run(texts=[hostile]))
    found = asked(server, "completions?step=2&first=0&shown=all")
    assert (found["count"], len(found["items"])) == (30, 12)
    rest = asked(server, "completions?step=2&first=24")["items"]
    assert len(rest) == 6
    right, wrong = (asked(server, f"completions?step=2&shown={shown}") for shown in ("right", "wrong"))
    assert right["count"] + wrong["count"] == 30
    assert {item["is_right"] for item in right["items"]} == {True}
    heads = [item["completion"]["head"] for item in (*found["items"], *rest)]
    assert any(head.endswith("<script>alert(1)</script>\n[U+001B][2J[U+202E]") for head in heads), "set as text later"
    assert asked(server, "completions?step=99&shown=no")["count"] == 0
    assert asked(server, "completions?step=-1")["step"] == 0


def test_a_campaign_has_a_page_that_links_the_page_of_each_run(tmp_path: Path, watch: Watch) -> None:
    folder = made_runs.write_campaign(tmp_path / "first", {"maxrl+none": 0.0, "a b/%#?": 0.0}, seeds=[1], steps=4)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry, name in zip(manifest["runs"], ("maxrl+none_s1", "a b%2F#?"), strict=True):
        (folder / "runs" / made_runs.SAFE.sub("-", f"{entry['condition']}_s1")).rename(folder / "runs" / name)
        entry["run_name"] = name
    away = tmp_path / "away"
    made_runs.write_run(away / "runs" / "x", made_runs.MadeRun(steps=2))
    manifest["runs"].append({"run_name": "later", "condition": "c", "seed": 9, "log_dir": ""})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    server = watch(folder)
    page = answer(server, f"/{server.token}/")[2]
    links = re.findall(r'<a href="(run/[^"]+)">', page)
    assert (len(links), "later" in page, "not started" in page) == (2, True, True)
    for link in links:
        status, headers, content = answer(server, f"/{server.token}/{link}")
        assert (status, '<a href="../../">Runs of first</a>' in content) == (200, True)
        assert headers["Content-Security-Policy"] != answer(server, f"/{server.token}/")[1]["Content-Security-Policy"]
        assert len(asked(server, f"{link}data")["rows"]) == 4 + 1
        assert asked(server, f"{link}completions?step=0")["count"] == 0
    outside = "run/..%2F..%2Faway%2Fruns%2Fx/"
    for path in ("data", "run", "run/", "run//", "run/later/", links[0][:-1], f"{links[0]}x", outside):
        assert answer(server, f"/{server.token}/{path}")[0] == 404, path


def test_each_look_at_an_unfinished_campaign_is_recorded_once(tmp_path: Path, watch: Watch) -> None:
    states = {("b+none", 1): "failed"}
    folder = made_runs.write_campaign(tmp_path / "c", {"a+none": 0.0, "b+none": 0.0}, seeds=[1], steps=4, states=states)
    said: list[str] = []
    server = WatchServer(folder, on_look=InterimLooks("watch", said.append).of)
    server.answer("", {})
    server.answer("", {})
    server.close()
    looks = [line for line in (tmp_path / "ledger.jsonl").read_text().splitlines() if '"watch"' in line]
    assert (len(looks), said) == (1, [])


def test_the_command_refuses_what_it_cannot_serve(watched_run: MakeRun, tmp_path: Path) -> None:
    done = invoke(command, [str(tmp_path)])
    assert codes_in(done.exception) == ["run.not-found"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = invoke(command, [str(watched_run()), "--port", str(taken.getsockname()[1])])
    assert codes_in(done.exception) == ["report.port-unusable"]


def test_ctrl_c_ends_it_cleanly(watched_run: MakeRun) -> None:
    folder = watched_run()
    argv = [sys.executable, "-c", "from retrain.report.commands import watch; watch()", str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{24,}/", url)
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "No longer watched.\n", "")


def line(step: int, **fields: object) -> str:
    return json.dumps({"step": step, "correct_rate": step / 100} | fields) + "\n"


def steps(tail: Tail) -> list[float]:
    return [row["step"] for row in tail.since(0, 0)[2]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(cuts=st.lists(st.integers(1, 700), max_size=12))
def test_however_the_file_grows_each_row_is_given_once(tmp_path: Path, cuts: list[int]) -> None:
    whole = "".join(line(step) for step in range(20)).encode()
    file = tmp_path / "metrics.jsonl"
    file.unlink(missing_ok=True)
    tail = Tail(file)
    have: list[float] = []
    generation = at = 0
    for cut in [*cuts, len(whole)]:
        with file.open("ab") as stream:
            stream.write(whole[at : at + cut])
        at += cut
        generation, first, rows = tail.since(generation, len(have))
        have = have[:first] + [row["step"] for row in rows]
    assert have == list(range(20))
    assert tail.since(generation, len(have)) == (generation, 20, [])


def test_a_look_reads_what_is_new_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step) for step in range(1000)))
    tail = Tail(file)
    assert steps(tail) == list(range(1000))
    parsed: list[bytes] = []
    parse = module.parse_record
    monkeypatch.setattr(module, "parse_record", lambda raw, **how: (parsed.append(raw), parse(raw, **how))[1])
    with file.open("a") as stream:
        stream.write(line(1000))
    assert steps(tail)[-1] == 1000
    assert len(parsed) == 1


def test_a_record_that_was_rewound_or_replaced_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    before = [line(step) for step in range(6)]
    file.write_text("".join(before))
    tail = Tail(file)
    generation, _, rows = tail.since(0, 0)
    assert len(rows) == 6
    os.truncate(file, len("".join(before[:3])))
    with file.open("a") as stream:  # grown past where it had been: its size says nothing
        stream.write("".join(line(step, loss=1.0) for step in range(3, 12)))
    again, first, rows = tail.since(generation, 6)
    assert (again, first, len(rows)) == (generation + 1, 0, 12)
    assert rows[3] == {"step": 3, "correct_rate": 0.03, "loss": 1.0}
    other = tmp_path / "other"
    other.write_text(line(0))
    other.replace(file)
    assert steps(tail) == [0]
    file.unlink()
    assert steps(tail) == [0], "what was read stays"


def test_damaged_lines_are_passed_over_and_counts_become_the_shares_that_charts_show(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = {"step": 1, "loss": 2, "eval_pass_at_4": 0.5, "reward_math_mean": 1}
    counts = {"useful_groups": 3, "all_wrong_groups": 1, "sampled_tokens": 200, "trained_tokens": 50}
    file.write_text(
        '{"step": 0, "loss": NaN, "correct_rate": "x", "lr": 1e999, "grad_norm": null, "mean_reward": true}\n'
        f'[1]\nno\n{{"loss": 1}}\n{{"step": "1"}}\n\n{json.dumps(good)}\n'
        + line(2, **counts, sample_time_s=4)
        + line(3, useful_groups=0, sampled_tokens=7)
    )
    none, whole, counted, uncounted = Tail(file).since(0, 0)[2]
    assert (none, whole, set(uncounted)) == ({"step": 0}, good, {"step", "correct_rate"})
    shares = {"useful_groups": 0.75, "trained_tokens": 0.25, "sampled_tokens": 50}
    assert {name: counted[name] for name in shares} == shares, "of groups and tokens, and per second"


def test_a_long_record_is_thinned_and_keeps_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    monkeypatch.setattr(module, "LOOK_BYTES", 4096)
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(line(step, **({"eval_correct_rate": 0.5} if step % 333 == 7 else {})) for step in range(3000))
    )
    tail = Tail(file)
    seen = -1
    while (now := len(steps(tail)) + tail.generation * 1000) != seen:
        seen = now
    kept = tail.since(0, 0)[2]
    assert len(kept) <= 100
    assert [row["step"] for row in kept if "eval_correct_rate" in row] == [7 + 333 * n for n in range(9)]
    assert kept == sorted(kept, key=lambda row: row["step"])
    assert kept[-1]["step"] > 2900
