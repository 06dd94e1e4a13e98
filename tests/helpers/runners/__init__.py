"""Drivers of a runner without an engine."""
