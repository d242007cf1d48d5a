"""The rewards that judge completions: `match`, `math`, `code`, `judge`, `custom`, `none`, and the puzzles' verifier.

Begin with `match.py`, the smallest. They read `[reward]` from `retrain_rewards.tables`; none imports a data source.
"""
