"""External stores: the interface (`base`), and the built-in stores (`registry`), each in modules of its own.

The library of a store is imported at its first use, by the processes of a system whose backend it is.
"""
