"""Before any test, and before any library is imported: an environment that is the same for everybody."""

from __future__ import annotations

import os

from tests.clean_environment import cleaned

# pytest reads this file before it collects: what a library reads once (threads, colours) is clean as well.
_CLEAN = cleaned(os.environ)
for _name in set(os.environ) - set(_CLEAN):
    del os.environ[_name]
os.environ.update(_CLEAN)
