"""Prefix-aware routing: replicas by cached prefixes, load and expected time. No network code."""
