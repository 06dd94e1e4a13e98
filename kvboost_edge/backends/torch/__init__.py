"""What the torch backend is made of: a pass's groups, their attention, blocks as stored or as
codes, Apple GPUs.
"""
