"""The server: for this machine and for who knows the token, read-only, and nothing in its answers that acts."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.report.commands import watch as command
from retrain.report.watch_server import HEADERS, WatchServer
from retrain.verdicts.ledger.looks import InterimLooks
from tests.kit import made_runs
from tests.kit.invoke import invoke
from tests.kit.problems import codes_in

Watch = Callable[[Path], WatchServer]
MakeRun = Callable[..., Path]


def answer(
    server: WatchServer, path: str, *, method: str = "GET", host: str = ""
) -> tuple[int, http.client.HTTPMessage, str]:
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


def test_only_who_knows_the_address_gets_anything_and_nothing_can_be_changed(
    watched_run: MakeRun, watch: Watch
) -> None:
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
