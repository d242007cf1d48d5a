"""Findings that several plugins make: an extra, a distribution, a server. None imports the package it is about."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from retrain.kernel.contracts.diagnosis import Diagnosis, Status
from retrain.kernel.plugins.installed import installed_version
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.plugins.requirements import required_packages

SERVER_TIMEOUT_S = 5.0
# Broken, or a gateway without a server. Any other status, 401 and 404 too, comes from a server that runs.
SERVER_FAULTS = (500, 502, 503, 504)


def diagnose_extra(distribution: str, extra: str, *, purpose: str, needed: bool) -> Diagnosis:
    """Check that everything that an extra adds is installed: `retrain-sepa[semantic]`."""
    packages, fix = required_packages(distribution, extra), install_line(distribution, extra)
    lacking = [package for package in packages if not package.is_met]
    name = f"{distribution}[{extra}]"
    if packages and not lacking:
        return Diagnosis(name=name, status="ok", detail=", ".join(map(str, packages)), needed=needed)
    detail = f"{', '.join(map(str, lacking))}: not installed, for {purpose}"
    if not packages:
        detail = f"{distribution} is not installed, or its version has no such extra; for {purpose}"
        fix = fix.replace("pip install ", "pip install --upgrade ", 1)
    return Diagnosis(name=name, status="missing", detail=detail, fix=fix, needed=needed)


def diagnose_distribution(distribution: str, *, purpose: str, needed: bool) -> Diagnosis:
    """Check that a distribution and its requirements are installed."""
    version = installed_version(distribution)
    lacking = [package for package in required_packages(distribution) if not package.is_met] if version else []
    status: Status = "failed" if lacking else "ok" if version else "missing"
    detail = version or f"not installed, for {purpose}"
    if lacking:
        detail = f"{version}, but lacks {', '.join(map(str, lacking))}"
    fix = "" if status == "ok" else install_line(distribution)
    return Diagnosis(name=distribution, status=status, detail=detail, fix=fix, needed=needed)


def diagnose_server(name: str, url: str, *, needed: bool) -> Diagnosis:
    """Check that a server answers at `url` within 5 s; any HTTP status but 500 and 502 to 504 is an answer."""
    import http.client  # not at the top: scoring processes import this module and contact no server
    import urllib.error
    import urllib.request

    try:
        parts = urlsplit(url)
        shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))  # no login, no key
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, an invalid port
        shown, is_url = url.rpartition("@")[2], False
    detail, fix = f"{shown} answers", ""
    if not is_url:
        detail, fix = f"{shown!r} is not a URL", "write it as http://HOST:PORT"
    else:
        try:
            with urllib.request.urlopen(shown, timeout=SERVER_TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            if error.code in SERVER_FAULTS:
                detail, fix = f"{shown} answers with HTTP status {error.code}", "look at the server's log"
        except (OSError, ValueError, http.client.HTTPException) as error:
            detail = f"{shown} does not answer: {getattr(error, 'reason', None) or error or type(error).__name__}"
            fix = "start the server, or correct the URL"
    return Diagnosis(name=name, status="failed" if fix else "ok", detail=detail, fix=fix, needed=needed)
