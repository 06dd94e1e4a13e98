"""Finding, in a prompt, runs of tokens that blocks hold: flat arrays of blocks, and the scan over
them.
"""
