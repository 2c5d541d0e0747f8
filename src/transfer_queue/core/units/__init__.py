"""Storage units as the controller sees them: their registration, moves and drains."""
