"""The commands of the program, one module a group. With cli.py the only place that prints.

A module here imports click and the standard library at its top and the rest inside its commands, so
that ``specserve --help`` stays fast.
"""
