"""`python -m THIS PARENT COMMAND...`: becomes COMMAND, and is asked to stop when PARENT dies.

So that a campaign whose runner is killed leaves no runs behind that nobody watches. On systems other than Linux it
only becomes COMMAND; runs that outlive their runner are then found by their locks.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind the process to its parent and replace it."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != int(parent):  # it died before it could be watched
            os._exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
