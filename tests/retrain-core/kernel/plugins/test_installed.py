"""What metadata say: which versions of retrain-core a distribution accepts, its requirements, its version."""

from __future__ import annotations

import json

import pytest
from importlib_metadata import Distribution
from pydantic import BaseModel, ConfigDict, Field

from retrain import __version__
from retrain.kernel.plugins.discover import headers_of, unmet_requirement
from retrain.kernel.plugins.installed import versions_of
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.plugins.requirements import installed_dependents
from retrain.kernel.plugins.resolve import validated_params


def unmet(folder, *requirements):
    """What a distribution with these requirements lacks."""
    lines = [
        "Metadata-Version: 2.1",
        "Name: theirs",
        "Version: 1.0",
        *(f"Requires-Dist: {each}" for each in requirements),
    ]
    (folder / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    name, _, requires = headers_of(Distribution.at(folder))
    return unmet_requirement(name, requires)


MET = ["retrain-core", "retrain-core>=0.0.1", "retrain-core[wandb]>=0.0.1,<99", f"retrain-core=={__version__}"]
MET += ["Retrain_Core (>=0.0.1)", 'retrain-core>=99; extra == "next"', "retrain-core-extras>=99", "retrain>=99"]
UNMET = ["retrain-core>=99", "retrain-core<0.0.1", "retrain_core == 99.0", "retrain.core[ray]>=99,<100"]
UNMET += ["retrain-core (>=99)", "retrain-core newest"]  # the last cannot be read


@pytest.mark.parametrize(("line", "is_met"), [*((line, True) for line in MET), *((line, False) for line in UNMET)])
def test_a_requirement_on_the_core_is_met_or_reported_with_both_versions(line, is_met, tmp_path):
    told = unmet(tmp_path, "numpy>=99", line)
    assert (told == "", unmet(tmp_path)) == (is_met, "")
    assert is_met or f"and this is {__version__}; fix: pip install --upgrade theirs" in told


def test_requirements_versions_and_dependents_come_from_metadata(distribution):
    distribution("theirs", {"theirs": ""}, version="3.2")
    assert versions_of(["theirs", "there-is-no-such-distribution", "retrain-core"]) == {
        "theirs": "3.2",
        "retrain-core": __version__,
    }
    lines = {
        "first-one": "The.Library>=1",
        "second_one": "the_library[big] (<2) ; python_version > '3'",
        "third": "the-library-extras",
        "fourth": "other",
    }
    for name, line in lines.items():
        site = distribution(name, {name.replace("-", "_"): ""})
        metadata = site / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text(encoding="utf-8") + f"Requires-Dist: {line}\n", encoding="utf-8")
    assert installed_dependents("the-library") == ("first-one", "second_one")
    assert installed_dependents("there-is-no-such-distribution") == ()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone, from whose folder retrain-core is installed; `retrain-later` in it requires a sibling that is not."""
    folder = tmp_path / "my clone"
    for name, required in (("retrain-core", []), ("retrain-later", ["retrain-core==1.0", "retrain-sooner==1.0"])):
        (folder / name).mkdir(parents=True)
        (folder / name / "pyproject.toml").write_text(f"[project]\ndependencies = {required}\n", encoding="utf-8")
    info = tmp_path / "site" / "retrain_core-9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: retrain-core\nVersion: 9.0\n", encoding="utf-8")
    record = {"url": (folder / "retrain-core").as_uri(), "dir_info": {}}
    (info / "direct_url.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_the_install_line_names_the_folders_of_the_clone_that_core_came_from(clone):
    core = "retrain-core[ray]"
    assert install_line("retrain-core", "ray") == f"pip install '{clone}/{core}'"
    assert install_line("retrain-later") == f"pip install '{clone}/retrain-later' '{clone}/retrain-sooner'"
    (clone / "constraints.txt").touch()
    assert install_line("retrain-core") == f"pip install -c '{clone}/constraints.txt' '{clone}/retrain-core'"
    assert install_line("somebody-elses") == "pip install somebody-elses"


@pytest.mark.parametrize("record", [None, {"url": "https://index/retrain_core.whl", "archive_info": {}}])
def test_the_install_line_of_a_wheel_is_the_name(clone, record):
    (file,) = clone.parent.glob("site/*/direct_url.json")
    file.write_text(json.dumps(record), encoding="utf-8") if record else file.unlink()
    assert install_line("retrain-later") == "pip install retrain-later"
    assert install_line("retrain-core", "ray") == "pip install 'retrain-core[ray]'"


class Params(BaseModel):
    """A strict model, as the documentation tells plugins to write them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    scale: float = Field(1.0, gt=0.0)
    names: list[str] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("given", "where", "code", "fix"),
    [
        ({"scal": 2.0}, "here", "plugin.unknown-option", "use 'scale'"),
        ({"zzz": 2.0}, "here", "plugin.unknown-option", "known: scale, names"),
        ({"scale": "2"}, "here.scale", "plugin.bad-option", "correct the value"),
        ({"scale": -1.0}, "here.scale", "plugin.bad-option", "correct the value"),
        ({"names": ["a", 3]}, "here.names.1", "plugin.bad-option", "correct the value"),
    ],
)
def test_bad_parameters_are_reported_with_their_place(given, where, code, fix):
    params, (problem,) = validated_params(Params, given, where="here")
    assert params is None
    assert (problem.where, problem.code, problem.fix) == (where, code, fix)


def test_good_parameters_are_the_model_any_pass_without_one_and_all_bad_ones_are_reported():
    assert validated_params(Params, {"scale": 2}, where="x") == (Params(scale=2.0), [])
    assert validated_params(None, {"whatever": object()}, where="x") == (None, [])
    assert len(validated_params(Params, {"scale": -1.0, "zzz": 1, "names": 3}, where="here")[1]) == 3
