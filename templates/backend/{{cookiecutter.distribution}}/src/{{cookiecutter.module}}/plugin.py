"""Registers this distribution with retrain; the entry point in pyproject.toml names this module."""

from __future__ import annotations

from collections.abc import Callable

from retrain.api import PluginSpec, hookimpl

# Cheap to import at every start. Move CAPABILITIES into its own module before yours imports torch.
from {{ cookiecutter.module }}.backend import CAPABILITIES


@hookimpl
def retrain_register_backends(register: Callable[[PluginSpec], None]) -> None:
    """Register the backend `{{ cookiecutter.name }}`."""
    register(
        PluginSpec(
            name="{{ cookiecutter.name }}",
            summary="{{ cookiecutter.description }}",
            factory="{{ cookiecutter.module }}.backend:create",
            params="{{ cookiecutter.module }}.backend:Options",
            traits=CAPABILITIES,  # read before the backend is built, to refuse configurations that need more
        )
    )
