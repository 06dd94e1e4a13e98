"""Which replicas there are, and how they are: told by Ray, asked again and again, seen from
within.
"""
