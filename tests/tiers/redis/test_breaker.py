"""The circuit breaker: after three failures in a row the server is not called, until one attempt
after the pause succeeds.
"""

from helpers.tiers.redis_cases import Clock
from kvboost_edge.tiers.redis.breaker import CircuitBreaker


def test_three_consecutive_failures_open_the_breaker():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    breaker.failed()
    breaker.failed()
    assert not breaker.succeeded()
    assert [breaker.failed() for _ in range(2)] == [False, False]
    assert not breaker.is_open
    assert breaker.failed(), "the third consecutive failure must open the breaker"
    assert breaker.is_open
    clock.now += 29.9
    assert breaker.is_open
    clock.now += 0.2
    assert not breaker.is_open


def test_a_failure_after_the_pause_reopens_the_breaker_silently():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(3):
        breaker.failed()
    clock.now += 31
    assert not breaker.failed()
    assert breaker.is_open


def test_a_success_after_the_pause_closes_the_breaker():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(3):
        breaker.failed()
    clock.now += 31
    assert breaker.succeeded()
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
