"""The timeline: a ring of events about which client waited, claimed and put when, for readers that evaluate it."""
