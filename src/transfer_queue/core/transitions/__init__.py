"""The transitions of the state: how records change it, and how saved states replace it or are added to it."""
