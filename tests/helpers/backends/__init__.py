"""Backends for the contract tests, and a stand-in for MPS."""
