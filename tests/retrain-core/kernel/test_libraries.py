"""What the kernel imports, and what is loaded before a room is used."""

import json
import subprocess
import sys

import pytest

from retrain import kernel
from tests.kit.shared import first_or_long

OURS = {"retrain", "retrain_sepa", "retrain_rewards", "retrain_local", "retrain_tinker", "retrain_prime_rl"}
# What the named libraries bring along.
BENEATH = {
    "importlib_metadata": {"lazy_importer", "zipp"},
    "pydantic": {"annotated_types", "pydantic_core", "typing_extensions", "typing_inspection"},
    "numpy": {"cython_runtime"},
}
RUN = "from retrain.cli.command_line import run; run(['{}'])"
# How retrain is entered, and which of the libraries may then be there: those of the kernel, click and rich.
LOADED = {
    "import retrain, retrain.api; dir(retrain)": set(),
    RUN.format("--help"): {"click", "importlib_metadata", "pluggy"},
    RUN.format("plugins"): {"click", "rich", *kernel.LIBRARIES},
    "import retrain.api as api; [getattr(api, name) for name in api.__all__]": set(kernel.LIBRARIES),
}
TELL = "import json, sys; before = sorted(sys.modules); {}; json.dump([before, sorted(sys.modules)], sys.stderr)"


@pytest.mark.parametrize("statement", first_or_long(LOADED), ids=["api", "help", "plugins", "names-of-api"])
def test_no_library_of_a_room_is_loaded_before_the_room_is_used(statement, tmp_path):
    command = [sys.executable, "-c", TELL.format(statement)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stderr)
    loaded = {name.partition(".")[0] for name in set(after) - set(before)} - sys.stdlib_module_names - OURS
    allowed = LOADED[statement].union(*(BENEATH.get(name, set()) for name in LOADED[statement]))
    assert {name for name in loaded if not name.startswith("_")} <= allowed
