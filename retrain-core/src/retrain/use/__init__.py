"""A trained model at work: evaluated, talked to, sampled, served, merged, exported, called by agents.

Begin with `subject.py` (a run, checkpoint or model by its name) and `opened.py` (loaded, ready to answer). Imports
nothing of campaigns, and nothing of what reads finished runs but the ledger.
"""
