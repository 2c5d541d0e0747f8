"""The live page: a separate process that shows one system in a browser, as a client that only reads."""
