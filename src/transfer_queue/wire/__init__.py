"""The encoding of values: blocks, buffers and objects. It does not use sockets, clocks or files."""
