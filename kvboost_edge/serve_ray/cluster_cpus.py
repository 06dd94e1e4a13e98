"""The CPUs of a Ray cluster's machines, and a check of the cluster's address."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from kvboost_edge.errors import BackendUnavailable, ConfigError

__all__ = ["check_address", "cpus_of_each"]

_ANSWERING_SECONDS = 10.0
# An HTTP/2 client preface, and the type of the frame with which an HTTP/2 server answers. Ray's
# head node is such a server.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_FRAME_HEAD = 9  # bytes


def cpus_of_each(
    workers: int, num_threads: int | None, machines: Sequence[int], free: int | None = None
) -> int:
    """Return the number of CPUs that each replica reserves.

    Args:
        workers: Number of replicas.
        num_threads: Threads of each replica, one CPU each. None chooses the largest number with
            which all replicas fit.
        machines: Number of CPUs of each machine. A replica does not span machines.
        free: Number of unreserved CPUs on all machines; None if all CPUs are unreserved.

    Raises:
        ConfigError: The cluster has too few CPUs.
    """
    free = sum(machines) if free is None else free
    most = max(machines, default=0)
    if num_threads is None:
        fitting = (
            each
            for each in range(min(free // workers, most), 1, -1)
            if _places(machines, each) >= workers
        )
        each = next(fitting, 1)
    else:
        each = num_threads
    if workers * each > free:
        raise ConfigError(
            f"workers={workers} with {each} threads each need {workers * each} CPUs, but only "
            f"{free} are available; lower --workers or --num-threads"
        )
    if each > most:
        raise ConfigError(
            f"no machine of the cluster has {each} CPUs (the largest has {most}); lower "
            "--num-threads"
        )
    if (places := _places(machines, each)) < workers:
        raise ConfigError(
            f"workers={workers} with {each} threads each do not fit on machines with "
            f"{sorted(machines)} CPUs, which have room for only {places}; lower --workers or "
            "--num-threads"
        )
    return each


def _places(machines: Sequence[int], each: int) -> int:
    """Return how many replicas with `each` CPUs fit on these machines."""
    return sum(cpus // each for cpus in machines)


def check_address(address: str) -> None:
    """Check that a Ray cluster listens at an address.

    If Ray uses TLS, an open port is enough, because only Ray has the keys.

    Raises:
        ConfigError: The address is invalid.
        BackendUnavailable: No cluster answers.
    """
    # Ray itself would wait for minutes before it reports an error.
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(
            f"ray_address={address!r} must be HOST:PORT of a cluster's head, or 'auto'"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWERING_SECONDS) as sock:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # as Ray reads it
                return
            sock.sendall(_PREFACE)
            head = sock.recv(_FRAME_HEAD, socket.MSG_WAITALL)
    except (OSError, OverflowError) as error:
        raise _nobody(address, str(error) or type(error).__name__) from error
    if len(head) < _FRAME_HEAD or head[3] != _SETTINGS:
        raise _nobody(address, "another program listens there")


def _nobody(address: str, reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"ray_address={address!r}: no Ray cluster answers there ({reason}); start one with `ray "
        "start --head`, or leave out --ray-address to start Ray on this machine"
    )
