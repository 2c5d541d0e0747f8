"""How columns of numbers and values are kept, saved and restored."""
