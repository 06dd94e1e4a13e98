"""KV storage in blocks and paged attention: reference, cpu (Numba), torch, cuda.

Importing this package loads no backend; `backends.select` chooses one and loads it.
"""
