"""Fake runners and movers for engine tests."""
