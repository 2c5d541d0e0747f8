"""Buffers: the layout of blocks, copies, and tensors over plain memory."""
