"""Tests of a bound shared by tenants against the written rule: no tenant takes everything, and each
always gets its share.
"""

import random

import pytest

from kvboost_edge.server.work.tenant_shares import Shares


def fill(shares, tenant):
    """Take places until no more fits; return their number."""
    count = 0
    while shares.fit(tenant, 1):
        shares.take(tenant, 1)
        count += 1
    return count


@pytest.mark.parametrize("weights", [{}, {"only": 4.0}])
def test_a_single_tenant_may_use_everything(weights):
    shares = Shares(10, weights, least=1)
    tenant = next(iter(weights), None)
    assert not shares.are_kept
    assert (shares.most(tenant), shares.kept_for(tenant)) == (10, 0)
    assert fill(shares, tenant) == shares.used == 10
    shares.give_back(tenant, 3)
    assert not shares.fit(tenant, 4)
    assert fill(shares, tenant) == 3


def test_half_is_reserved_by_weight_and_half_is_shared():
    shares = Shares(100, {"light": 1.0, "heavy": 4.0})
    assert [shares.kept_for(name) for name in ("light", "heavy")] == [10, 40]
    assert fill(shares, "light") == shares.most("light") == 60
    assert fill(shares, "heavy") == 40
    shares.give_back("light", 60)
    assert fill(shares, "heavy") == 50
    assert (shares.used_by("heavy"), shares.used) == (90, 90)
    assert fill(shares, "light") == 10


@pytest.mark.parametrize(
    ("limit", "weights", "kept"),
    [
        (4, (1, 1), [1, 1]),
        (2, (1, 1), [1, 1]),
        (3, (1000, 1, 1), [1, 1, 1]),
        (10, (1000, 1, 1), [2, 1, 1]),
        (1, (1, 1), [0, 0]),  # more tenants than places: first come, first served
    ],
)
def test_every_tenant_gets_the_minimum_while_it_lasts(limit, weights, kept):
    names = [str(number) for number in range(len(weights))]
    shares = Shares(limit, dict(zip(names, map(float, weights), strict=True)), least=1)
    assert [shares.kept_for(name) for name in names] == kept
    assert fill(shares, "0") == limit - sum(kept[1:])
    assert [fill(shares, name) for name in names[1:]] == kept[1:]


def test_requests_without_a_key_have_no_reserved_share():
    shares = Shares(100, {"one": 1.0, "two": 1.0})
    assert fill(shares, None) == shares.most(None) == 50
    assert fill(shares, "one") == 25


def test_shares_hold_in_any_order_of_requests(scale):
    """The sum never exceeds the limit, and a tenant within its share is always admitted."""
    for seed in range(scale(200, 5000)):
        draw = random.Random(seed)
        weights = {
            str(number): draw.choice((0.001, 0.5, 1.0, 4.0, 1000.0))
            for number in range(draw.randint(2, 6))
        }
        limit = draw.randint(1, 200)
        least = draw.randint(0, 1)
        shares = Shares(limit, weights, least)
        used = dict.fromkeys([*weights, None], 0)
        for _ in range(60):
            tenant = draw.choice(list(used))
            amount = draw.randint(0, limit)
            if draw.random() < 0.4:
                amount = min(amount, used[tenant])
                shares.give_back(tenant, amount)
                used[tenant] -= amount
                continue
            after = {**used, tenant: used[tenant] + amount}
            fits = (
                sum(max(number, shares.kept_for(name)) for name, number in after.items()) <= limit
            )
            assert shares.fit(tenant, amount) == fits
            assert fits or after[tenant] > shares.kept_for(tenant)
            assert not fits or amount <= shares.most(tenant)
            if fits:
                shares.take(tenant, amount)
                used = after
            assert shares.used == sum(used.values()) <= limit
            assert all(shares.used_by(name) == number for name, number in used.items())
