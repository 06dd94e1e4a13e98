"""Served models: loading, unloading, memory, and their listing."""
