"""What a command does: the composition roots, one module a command.

Prints nothing and never exits.
"""
