"""Requests with their prompts, terms, checks, progress and results."""
