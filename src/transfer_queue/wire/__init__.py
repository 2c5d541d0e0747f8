"""Bytes: frames, the layout of blocks, objects and tensors. Pure: no sockets, clocks or files."""
