"""The blocks that contain the values: where they are, which rows need them, and which values are equal."""
