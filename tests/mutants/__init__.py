"""Mutation tests: `nox -s mutants` changes one expression at a time in the modules whose faults would be silent.

`mutations.py` makes the mutants, `hook.py` loads one in place of its module, `__main__.py` draws a sample and runs the
tests that import the module. `accepted.toml` lists mutants that no test can notice, each with its reason.
"""
