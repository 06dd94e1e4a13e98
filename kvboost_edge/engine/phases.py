"""Where the time of a request went."""

from __future__ import annotations

from kvboost_edge.engine.request import Request

__all__ = ["phase_times"]


def phase_times(
    request: Request,
    now: float,
    *,
    looked_up: float | None,
    admitted: float | None,
    repaired: float | None,
    first_token: float | None,
    load_seconds: float,
    probe_seconds: float,
) -> dict[str, float]:
    """Milliseconds between the marks of a request's life, seconds of `time.perf_counter`; a mark
    that was never reached takes the next one's time.
    """
    first = now if first_token is None else first_token
    let_in = first if admitted is None else admitted
    looked = let_in if admitted is None or looked_up is None else looked_up
    probed = let_in + probe_seconds
    whole = min(max(repaired or probed, probed), max(first, probed))
    return {
        "tokenize": (request.tokenized_at - request.entered_at) * 1e3,
        "queue": (looked - request.tokenized_at - load_seconds) * 1e3,
        "lookup": (let_in - looked) * 1e3,
        "load": load_seconds * 1e3,
        "probe": probe_seconds * 1e3,
        "repair": (whole - probed) * 1e3,
        "prefill": (first - whole) * 1e3,
        "decode": (now - first) * 1e3,
    }
