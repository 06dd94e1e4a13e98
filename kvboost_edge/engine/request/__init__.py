"""Requests: prompts, terms, checks before anything is loaded, progress and results."""
