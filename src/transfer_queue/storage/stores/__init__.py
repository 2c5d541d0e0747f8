"""External stores: the interface (`base`), and those that are built in (`registry`), each in modules of its own.

A store's library is imported where it is used, by the processes of a system that has it as its backend.
"""
