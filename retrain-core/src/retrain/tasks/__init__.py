"""Verifiable tasks: prompts drawn, completions sampled, rewards in processes that can be killed, and their audit.

Begin with `tasks.py` (from `[data]`, `[reward]` and `[environment]` to rollouts) and `scoring/service.py`. Imports
`text` and `records` beside the kernel, and nothing of credit or of the loop around it.
"""
