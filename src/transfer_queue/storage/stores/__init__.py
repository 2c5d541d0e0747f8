"""External stores: what one has to offer (`base`), and those that are built in, each in a module of its own.

A store's library is imported where it is used, by the processes of a system that has it as its backend.
"""
