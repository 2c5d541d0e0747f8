"""The benchmarks: each module has QUESTION, `run(scale)`, which returns rows of figures, and an optional NOTE."""
