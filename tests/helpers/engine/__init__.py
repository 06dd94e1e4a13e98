"""Fake runners and I/O threads for engine tests."""
