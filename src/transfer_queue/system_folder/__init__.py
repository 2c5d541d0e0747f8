"""The folder of a running system: its files, and the locks that show which of its processes live."""
