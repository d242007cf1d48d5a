"""Pages: a campaign or runs as one file that needs no network, a run watched while it continues, credit as colours.

Begin with `shell.py` and `parts.py`, which every page of the core is made with, then `page.py`; `watch/` is the live
page. Draws what `verdicts` says and decides nothing itself.
"""
