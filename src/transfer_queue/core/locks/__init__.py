"""The locks of keys: how they are granted, released and listed, and what happens if their holders die."""
