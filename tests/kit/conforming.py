"""All checks of a kind, on a part whose code a test writes."""

from pathlib import Path

import pytest

from retrain.testing import conformance


def check_conforms(kind: str, source: str, monkeypatch: pytest.MonkeyPatch, folder: Path, module: str) -> None:
    """`PLUGIN` of this source, imported as `module` from now on, passes every check of its kind."""
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    checks = conformance(kind, f"{module}.PLUGIN")
    assert len(checks) > 5
    for check in checks:
        check()
