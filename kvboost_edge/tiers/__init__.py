"""Where keys and values live beside the pool: tiers of whole blocks, and the thread that moves
them.
"""
