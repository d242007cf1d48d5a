"""The suites of backends and engines distinguish a sound backend from one with a single fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from retrain.testing import ConformanceError, conformance
from tests.kit.shared import first_or_long

Failures = Callable[..., dict[str, str]]
BROKEN = (
    ("OneShort", "samples_one_completion_per_seed", "[4, 2, 1]"),
    ("EmptyCompletions", "samples_one_completion_per_seed", "of shape (0,)"),
    ("PositiveLogs", "gives_log_probabilities", "a log-probability is "),
    ("NotFinite", "gives_log_probabilities", "not finite"),
    ("AlwaysCertain", "gives_log_probabilities", "all log-probabilities are 0"),
    ("TalksOn", "ends_where_it_says", "tokens follow the end token"),
    ("DropsTheEnd", "ends_where_it_says", "but others have it in their middle"),
    ("SaysLength", "ends_where_it_says", "stop_reason is 'length', and the last token is"),
    ("TwoAtLeast", "cuts_at_max_tokens", "2 tokens with max_tokens = 1"),
    ("OldVersion", "tells_the_policy_version", "policy_version is [-1], published is 0"),
    ("ByPlace", "repeats_a_seed", "sampled in another order"),
    ("OneSeed", "draws_by_the_seed", "16 seeds"),
    ("IgnoresTemperature", "heeds_the_temperature", "mean log-probability"),
    ("NoEntropies", "gives_entropies_when_asked", "provides_entropy is declared"),
    ("WritesPrompts", "leaves_requests_alone", "has changed a prompt"),
    ("DeliversTwice", "delivers_what_it_returns", "delivered twice"),
    ("DeliversOthers", "delivers_what_it_returns", "is not the one returned"),
    ("ClosesOnce", "can_be_closed_twice", "closed already"),
    ("NeverCloses", "is_closed_for_good", "sample works after close"),
    ("WrongSign", "makes_rewarded_tokens_likelier", "check the sign"),
    ("Averages", "credits_single_tokens", "nothing changed"),
    ("Decays", "changes_nothing_without_credit", "without any advantage"),
    ("RefersToItself", "remembers_its_reference", "or moves with training"),
    ("FixedRate", "trains_at_the_rate_it_is_given", "reports 0.0 and changes the policy"),
    ("CountsCredited", "reports_what_it_did", "num_tokens is 1"),
    ("ReportsNothing", "reports_what_it_did", "loss is nan"),
    ("Placeholder", "reports_what_it_did", "loss_is_placeholder is True"),
    ("OffPolicy", "has_ratio_1_on_its_own_policy", "at temperature 0.7"),
    ("PublishesAtOnce", "publishes_when_asked", "before publish"),
    ("NeverGrows", "publishes_when_asked", "publish() returned [0, 0, 0]"),
    ("TakesAnything", "refuses_numbers_that_are_not_finite", "train took advantages_T with nan"),
    ("RefusesTooLate", "refuses_numbers_that_are_not_finite", "after refused steps"),
    ("WritesRows", "leaves_batches_alone", "has changed advantages_T of a row"),
    ("StartsAnywhere", "repeats_a_run", "two runs with seed 1 differ from completion 0 of step 0 on"),
    ("ForgetsMoments", "goes_on_from_a_checkpoint", "step 2 after a resume"),
    ("ForgetsTheCount", "goes_on_from_a_checkpoint", "the version is 0 after load"),
    ("SavesByMoving", "saving_changes_nothing", "a run that saves"),
    ("Pickles", "writes_a_peft_adapter", "and no adapter_model.safetensors"),
    ("BadTensors", "writes_a_peft_adapter", "cannot be read"),
    ("Contradicts", "declares_its_capabilities", "one of the two is wrong"),
)
PLUGIN = """
from dataclasses import replace
from policy_parts import CAPABILITIES, Backend
from retrain.api import PluginSpec, hookimpl
LIES = replace(CAPABILITIES, provides_entropy=False)
@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="honest", summary="Sound.", factory=Backend, traits=CAPABILITIES))
    register(PluginSpec(name="liar", summary="Sound, but for its traits.", factory=Backend, traits=LIES))
    register(PluginSpec(name="silent", summary="Without traits.", factory=Backend))
"""


@pytest.mark.parametrize("part", first_or_long(["policy_parts.Backend", "broken_policies.PromisesLittle"]))
def test_sound_backends_pass(part: str, failures: Failures) -> None:
    assert failures("backend", part) == {}


@pytest.mark.parametrize(("part", "check", "words"), BROKEN)
def test_broken_backends_are_named(part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures("backend", f"broken_policies.{part}", only=check)[check]


def test_traits_must_be_the_capabilities_of_the_object(distribution: Callable[..., object], failures: Failures) -> None:
    distribution("retrain-policies", {"policy_plugin": PLUGIN})
    name = "declares_its_capabilities"
    assert failures("backend", "honest", only=name) == {}
    assert "registered with traits Capabilities(" in failures("backend", "liar", only=name)[name]
    assert "registered with traits None" in failures("backend", "silent", only=name)[name]


@pytest.mark.long
def test_an_engine_is_tried_in_the_backend_that_the_caller_names() -> None:
    config = {"backend": {"backend": "policy_parts.Backend"}, "model": {"model": "conformance:toy"}}
    for check in conformance("inference engine", "broken_policies.OneShort", config=config):
        check()  # that backend uses no engine: it is what answers
    broken = config | {"backend": {"backend": "broken_policies.OneShort"}}
    checks = {str(check): check for check in conformance("inference engine", "policy_parts.Backend", config=broken)}
    with pytest.raises(ConformanceError, match="groups of"):
        checks["samples_one_completion_per_seed"]()


@pytest.mark.long
def test_an_engine_is_tried_with_a_toy_policy_where_no_backend_is_installed(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local")
    assert failures("inference engine", "policy_parts.Engine") == {}
