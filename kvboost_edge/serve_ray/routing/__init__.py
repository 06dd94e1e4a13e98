"""Which replica a request goes to: what each holds, how busy it is, what a first token would cost
there. No network.
"""
