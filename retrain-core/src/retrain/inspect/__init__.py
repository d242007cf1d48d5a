"""Looks into runs: status, diff, the credit of each token, where the signal went, a step computed again.

Begin with `status_scan.py` and `diff_data.py`; `signal/` and `replay/` are plugins of their own. Reads runs through
`records`, and never imports a campaign or an engine.
"""
