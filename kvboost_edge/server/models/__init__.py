"""Served models, including loading, unloading, memory and listings."""
