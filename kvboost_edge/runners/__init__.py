"""Runners: a flat batch of tokens in, logits out. Importing this package loads nothing heavy."""
