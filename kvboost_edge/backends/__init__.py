"""Storage of keys and values in blocks, and attention that reads them in place: reference, cpu
(Numba), torch.

Importing this package loads no backend; `backends.select` picks one and loads it.
"""
