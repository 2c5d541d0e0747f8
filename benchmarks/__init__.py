"""Benchmarks of this repository, which the package does not contain: `python -m benchmarks`, run in a checkout.

`suite` has a module for each benchmark, `harness` has the code that they share, and `peers` has the programs that
measure other systems in separate environments. `performance` runs the benchmarks, and keeps their results in
`measured`. `tools/make_figures.py` makes docs/performance.md and other pages of them.
"""
