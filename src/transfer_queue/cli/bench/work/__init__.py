"""What is put and done in a benchmark: alone in a folder, and without imports of this package, so that other systems
can be given the same."""
