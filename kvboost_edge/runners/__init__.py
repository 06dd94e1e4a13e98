"""Runners: a flat batch of tokens to logits; importing this package loads no torch."""
