"""The live page: a process of its own that shows one system in a browser, as a client that only reads."""
