"""The timeline: a ring of events about who waited, claimed and put when, for readers that evaluate it."""
