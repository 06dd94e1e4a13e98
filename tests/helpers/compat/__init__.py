"""Inputs for the LMCache-compatible engine."""
