"""Where a text's last tokens stood before: what followed them there is a guess at what follows
now.
"""
