"""The parts that every server process has: start and end, log, and handling of envelopes."""
