"""Python objects as bytes and back."""
