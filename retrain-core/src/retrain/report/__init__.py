"""Pages: a campaign or runs as one file that needs no network, a run watched while it goes on, credit as colours.

Begin with `page.py` and `gather.py`; `watch/` is the live page. Draws what `verdicts` says and decides nothing itself.
"""
