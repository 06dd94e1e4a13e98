"""Background jobs that seal segments one at a time, in a thread that ends after the last job."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Sealer"]

_LOG = logging.getLogger(__name__)
Job = Callable[[], None]


class Sealer:
    """Runs jobs one at a time in a background thread, in the order of their arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> None:
        """Queue a job.

        The job runs in the caller's thread if no thread can be started. This happens at a system
        limit or at interpreter exit.
        """
        with self._lock:
            self._jobs.append(job)
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="kvboost-disk-seal")
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
                return
        self._run()

    def join(self) -> None:
        """Wait until all jobs are done."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                _LOG.exception("a segment of the disk tier cannot be sealed")
