"""Model directories: where they are, what they contain, whether they are sound, and what identifies
them.
"""
