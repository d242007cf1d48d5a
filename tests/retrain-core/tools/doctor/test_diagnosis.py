"""The doctor's checks of packages and servers, with real metadata and real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.plugins.installed import installed_version
from retrain.kernel.plugins.requirements import required_packages
from retrain.tools.doctor.diagnosis import diagnose_distribution, diagnose_extra, diagnose_server

REQUIRES = """\
Requires-Dist: numpy>=1
Requires-Dist: pydantic>=900
Requires-Dist: no-such-package
Requires-Dist: only-elsewhere; sys_platform == "no-such-platform"
Requires-Dist: numpy>=1; extra == "small"
Requires-Dist: no-such-extra-package; extra == "big"
Requires-Dist: not a requirement at all !!
Provides-Extra: small
Provides-Extra: big
"""


@pytest.fixture
def hungry(distribution: Callable[..., Path]) -> None:
    """An installed distribution with requirements of every kind."""
    site = distribution("hungry", {"hungry": ""})
    with (site / "hungry-1.0.dist-info" / "METADATA").open("a", encoding="utf-8") as metadata:
        metadata.write(REQUIRES)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a server that answers `/CODE` with that status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(self.path[1:4]))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.usefixtures("hungry")
def test_requirements_of_other_platforms_and_extras_do_not_count() -> None:
    always = {package.name: package.is_met for package in required_packages("hungry")}
    assert always == {"numpy": True, "pydantic": False, "no-such-package": False}
    assert [package.name for package in required_packages("hungry", "big")] == ["no-such-extra-package"]
    assert required_packages("there-is-no-such-distribution") == ()


def test_metadata_without_modules_is_not_installed(distribution: Callable[..., Path]) -> None:
    site = distribution("hollow-one", {"hollow_one": ""})
    assert installed_version("hollow-one") == "1.0"
    (site / "hollow_one.py").unlink()
    (site / "hollow_one-1.0.dist-info" / "top_level.txt").write_text("hollow_one\n")
    assert installed_version("hollow-one") == ""


@pytest.mark.usefixtures("hungry")
@pytest.mark.parametrize(
    ("extra", "status", "fix"),
    [
        ("small", "ok", ""),
        ("big", "missing", "pip install 'hungry[big]'"),
        ("none", "missing", "pip install --upgrade 'hungry[none]'"),
    ],
)
def test_an_extra_is_there_when_all_that_it_adds_is(extra: str, status: str, fix: str) -> None:
    found = diagnose_extra("hungry", extra, purpose="the test", needed=True)
    assert (found.name, found.status, found.fix) == (f"hungry[{extra}]", status, fix)
    assert found.is_fatal == (status != "ok")


@pytest.mark.usefixtures("hungry")
def test_a_distribution_that_lacks_requirements_is_broken() -> None:
    found = diagnose_distribution("hungry", purpose="the test", needed=True)
    assert found.status == "failed"
    assert "no-such-package" in found.detail
    assert "(wants >=900)" in found.detail
    missing = diagnose_distribution("no-such-distribution", purpose="the test", needed=False)
    assert (missing.status, missing.fix, missing.is_fatal) == ("missing", "pip install no-such-distribution", False)


@pytest.mark.parametrize(
    ("code", "status"), [(200, "ok"), (401, "ok"), (404, "ok"), (501, "ok"), (500, "failed"), (503, "failed")]
)
def test_any_answer_but_a_server_error_will_do_and_no_login_is_shown(server: str, code: int, status: str) -> None:
    url = f"{server.replace('//', '//me:hunter22@')}/{code}?api_key=hunter22"
    found = diagnose_server("s", url, needed=True)
    assert found.status == status
    assert "hunter22" not in repr(found)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x/", "http://", "", "http://[::1", "http://127.0.0.1:99999999"]
)
def test_what_is_no_url_fails(url: str) -> None:
    found = diagnose_server("s", url, needed=True)
    assert (found.status, found.is_fatal, bool(found.fix)) == ("failed", True, True)


def test_a_server_that_is_not_there_and_one_that_talks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "does not answer: " in diagnose_server("s", f"http://127.0.0.1:{port}", needed=True).detail
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        Thread(target=answer, daemon=True).start()
        found = diagnose_server("s", f"http://127.0.0.1:{listener.getsockname()[1]}", needed=True)
    assert found.status == "failed"


@pytest.mark.parametrize(("status", "fatal"), [("ok", False), ("warn", False), ("missing", True), ("failed", True)])
def test_only_what_is_needed_and_not_there_is_fatal(status: Any, fatal: bool) -> None:
    assert [Diagnosis(name="x", status=status, needed=needed).is_fatal for needed in (True, False)] == [fatal, False]
