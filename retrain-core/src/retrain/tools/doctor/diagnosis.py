"""Findings that several plugins make: an extra, a distribution, a server."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.plugins.first_party import install_line
from retrain.kernel.plugins.installed import installed_version
from retrain.run.packages import required_packages

SERVER_TIMEOUT_S = 5.0
SERVER_FAULTS = (500, 502, 503, 504)  # broken, or a gateway without a server; any other status counts as an answer


def diagnose_extra(distribution: str, extra: str, *, purpose: str, needed: bool) -> Diagnosis:
    """Whether everything that an extra adds is installed: `retrain-sepa[semantic]`; imports nothing."""
    packages = required_packages(distribution, extra)
    lacking = [package for package in packages if not package.is_met]
    name = f"{distribution}[{extra}]"
    if not packages:
        detail = f"{distribution} is not installed, or its version has no such extra; for {purpose}"
        fix = install_line(distribution, extra).replace("pip install ", "pip install --upgrade ", 1)
        return Diagnosis(name=name, status="missing", detail=detail, fix=fix, needed=needed)
    if not lacking:
        return Diagnosis(name=name, status="ok", detail=", ".join(map(str, packages)), needed=needed)
    detail = f"{', '.join(map(str, lacking))}: not installed, for {purpose}"
    return Diagnosis(name=name, status="missing", detail=detail, fix=install_line(distribution, extra), needed=needed)


def diagnose_distribution(distribution: str, *, purpose: str, needed: bool) -> Diagnosis:
    """Whether a distribution and all that it requires are installed; imports nothing."""
    version = installed_version(distribution)
    fix = install_line(distribution)
    if not version:
        detail = f"not installed, for {purpose}"
        return Diagnosis(name=distribution, status="missing", detail=detail, fix=fix, needed=needed)
    if lacking := [package for package in required_packages(distribution) if not package.is_met]:
        detail = f"{version}, but lacks {', '.join(map(str, lacking))}"
        return Diagnosis(name=distribution, status="failed", detail=detail, fix=fix, needed=needed)
    return Diagnosis(name=distribution, status="ok", detail=version, needed=needed)


def diagnose_server(name: str, url: str, *, needed: bool) -> Diagnosis:
    """Whether a server answers at `url` within five seconds; any HTTP status but 500 and 502 to 504 is an answer."""
    import http.client  # not at the top: scoring processes import this module and contact no server
    import urllib.error
    import urllib.request

    try:
        parts = urlsplit(url)
        shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))  # no login, no key
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, an invalid port
        shown, is_url = url.rpartition("@")[2], False
    if not is_url:
        fix = "write it as http://HOST:PORT"
        return Diagnosis(name=name, status="failed", detail=f"{shown!r} is not a URL", fix=fix, needed=needed)
    try:
        with urllib.request.urlopen(shown, timeout=SERVER_TIMEOUT_S) as answer:
            code = answer.status
    except urllib.error.HTTPError as error:
        code = error.code
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        detail = f"{shown} does not answer: {reason or type(error).__name__}"
        fix = "start the server, or correct the URL"
        return Diagnosis(name=name, status="failed", detail=detail, fix=fix, needed=needed)
    if code in SERVER_FAULTS:
        detail, fix = f"{shown} answers with HTTP status {code}", "look at the server's log"
        return Diagnosis(name=name, status="failed", detail=detail, fix=fix, needed=needed)
    return Diagnosis(name=name, status="ok", detail=f"{shown} answers", needed=needed)
