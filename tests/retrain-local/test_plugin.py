from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from retrain.api import ConfigError, Kind, load_plugins
from retrain.kernel.config import schema
from retrain_local.options import LocalOptions
from retrain_local.plugin import CAPABILITIES


def test_registration_imports_nothing_heavy() -> None:
    code = (
        "import sys; from retrain.api import load_plugins; load_plugins();"
        "print([m for m in ('torch', 'transformers', 'peft', 'safetensors', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_part_is_registered() -> None:
    plugins = load_plugins()
    (backend,) = plugins.find(Kind.BACKEND, "local")
    assert backend.spec.traits == CAPABILITIES
    assert backend.spec.load_params() is LocalOptions
    for kind, name in ((Kind.INFERENCE_ENGINE, "pytorch"), (Kind.TEMPLATE, "tiny")):
        (entry,) = plugins.find(kind, name)
        assert entry.owner.distribution == "retrain-local"
        assert entry.spec.load()


def test_the_builtin_model_is_a_folder_inside_the_package_and_others_are_left_to_others() -> None:
    import retrain_local

    plugins = load_plugins()
    folder = Path(retrain_local.__file__).parent / "tiny"
    assert plugins.locate_model("builtin:tiny") == str(folder)
    assert (folder / "model.safetensors").is_file()
    assert plugins.locate_model("Qwen/Qwen3-0.6B") is None
    with pytest.raises(ConfigError, match="builtin:tiny"):
        plugins.locate_model("builtin:tny")


def test_options_take_nothing() -> None:
    with pytest.raises(ValidationError):
        LocalOptions.model_validate({"transport": "zmq"})


def test_template_is_valid_for_the_kernels_tables() -> None:
    (entry,) = load_plugins().find(Kind.TEMPLATE, "tiny")
    document = tomllib.loads(entry.spec.load())
    models = {
        "model": schema.ModelTable,
        "backend": schema.BackendTable,
        "algorithm": schema.AlgorithmTable,
        "training": schema.TrainingTable,
        "data": schema.DataTable,
        "eval": schema.EvalTable,
        "logging": schema.LoggingTable,
    }
    for table, model in models.items():
        model.model_validate(document[table])
    assert document["model"]["model"] == "builtin:tiny"
    assert document["sepa"]["delay_steps"] + document["sepa"]["steps"] < document["training"]["max_steps"]
