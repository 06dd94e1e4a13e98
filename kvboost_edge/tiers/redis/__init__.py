"""Blocks on a Redis or Valkey server that several machines share: where it is, values and their
seals, the tier.
"""
