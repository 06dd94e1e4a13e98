"""Prefix-aware routing: a replica by its cached prefixes, load and expected time. No network."""
