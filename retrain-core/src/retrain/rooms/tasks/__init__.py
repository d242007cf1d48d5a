"""Verifiable tasks: prompts drawn, completions sampled, verifiers in processes that can be killed."""
