"""Verifiable tasks: prompts, sampled completions, rewards in processes that can be killed, and the audit of a reward.

Begin with `tasks.py` (from `[data]`, `[reward]` and `[environment]` to rollouts) and `scoring/service.py`. Imports
`text`, `records` and the kernel, nothing of credit or of the loop around it.
"""
