"""Numba's thread team: how many threads, and which threading layer runs them. Numba is loaded on first use."""

from __future__ import annotations

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.cpu import default_num_threads

__all__ = ["configure_threads", "threading_layer"]


def configure_threads(num_threads: int | None = None) -> int:
    """Set the number of threads that parallel kernels use from now on; returns it.

    None takes `default_num_threads()`, cut to the size of the team. A larger number than the team has is refused
    with ConfigError: the team's size is fixed by NUMBA_NUM_THREADS when numba is first loaded.

    The setting belongs to the calling thread: the engine calls this on the thread that runs the kernels.
    """
    import numba

    team = int(numba.config.NUMBA_NUM_THREADS)
    if num_threads is None:
        num_threads = min(default_num_threads(), team)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or not 1 <= num_threads <= team:
        raise ConfigError(
            f"num_threads={num_threads!r} must be an integer from 1 to {team}, the size of the thread team; "
            "NUMBA_NUM_THREADS, set before the start, makes the team larger"
        )
    numba.set_num_threads(num_threads)
    return num_threads


def threading_layer() -> str:
    """Name of the active threading layer: 'omp', 'tbb' or 'workqueue'; starts the team if it is not running."""
    import numba

    numba.set_num_threads(numba.get_num_threads())
    return str(numba.threading_layer())
