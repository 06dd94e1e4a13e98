"""Prefix-aware routing: choice of replicas by cached prefixes and load. No network code."""
