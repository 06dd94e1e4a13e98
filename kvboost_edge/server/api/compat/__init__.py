"""Other APIs in front of the same generation: each a translation of bodies and answers, with routes
of its own.
"""
