"""Tiny models on disk, and a hub to fetch them from."""
