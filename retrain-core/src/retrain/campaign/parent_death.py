"""`python -m retrain.campaign.parent_death PARENT COMMAND...`: runs COMMAND; it gets SIGTERM if PARENT dies.

A campaign that is killed thus leaves no orphaned runs. Other systems than Linux have no such signal; there, the next
session finds runs that are still alive by their locks.
"""

from __future__ import annotations

import os
import signal
import sys

# From linux/prctl.h; Python has no name for it.
PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        # The parent may have died before the signal was requested: then it never comes.
        if os.getppid() != int(parent):
            os._exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
