"""The models of one server: which are loaded, how they come and go, and what is said of all of
them.
"""
