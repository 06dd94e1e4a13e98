"""Backends for paged KV storage and attention: reference, cpu (Numba), torch and cuda.

Importing this package loads no backend. `backends.select` chooses a backend and imports it.
"""
