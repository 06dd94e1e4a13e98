"""Model families, one file each, and the code that they share.

The file of a family contains its config handling, its flags, and its tensor names in GGUF files.
"""
