"""Registers this distribution with retrain; the entry point in pyproject.toml names this module."""

from __future__ import annotations

from collections.abc import Callable

from retrain.api import PluginSpec, hookimpl


@hookimpl
def {{ cookiecutter.hook }}(register: Callable[[PluginSpec], None]) -> None:
    """Register the {{ cookiecutter.kind }} `{{ cookiecutter.name }}`."""
    register(
        PluginSpec(
            name="{{ cookiecutter.name }}",
            summary="{{ cookiecutter.description }}",
            # A string is imported only when a configuration selects it, so every other command stays fast.
            factory="{{ cookiecutter.module }}.{{ cookiecutter.file }}:{{ cookiecutter.factory }}",
{% if cookiecutter.params %}
            params="{{ cookiecutter.module }}.{{ cookiecutter.file }}:{{ cookiecutter.params }}",
{% endif %}
        )
    )
