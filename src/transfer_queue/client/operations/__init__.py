"""The operations of a client, as generators that yield calls."""
