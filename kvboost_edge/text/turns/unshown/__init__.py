"""Tools for models whose chat template shows none, or shows no calls."""
