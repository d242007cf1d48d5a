"""A thread for rank 0's part of a call, in which no signal can interrupt a collective operation halfway."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Task:
    """Work that was handed to the thread, and how it ended."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._done = work, threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it."""
        try:
            self.value = self._work()
        except BaseException as error:  # handed to the thread that waits
            self.error = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        return self._done.wait(timeout_s)


class OwnThread:
    """One thread for all tasks, since PyTorch keeps threads of its own for each; it does not outlive the process."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="rank 0", daemon=True).start()

    def begin(self, task: Task) -> None:
        """Begin this once all earlier work has ended."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after what it is doing."""
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            del task  # its result may be as large as the model
