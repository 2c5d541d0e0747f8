"""What every server process does: its life, its log, its service."""
