"""The controller's view of storage units: their registration, the checks of their reports, migrations and drains."""
