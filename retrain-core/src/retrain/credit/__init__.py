"""Credit assignment: from the scores of a group to one number per sampled token; KL, a teacher, a supervised warm-up.

Begin with `flow.py` (which parts the file names) and `pipeline.py` (what they do to a group). Imports nothing of
`tasks`, and nothing of the run that calls it.
"""
