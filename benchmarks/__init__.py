"""Benchmarks of this repository, which the package does not contain: `python -m benchmarks`, run in a checkout.

`suite` has a module for each benchmark, `harness` what they share, `peers` the programs that measure other systems in
environments of their own. `performance` runs the benchmarks and writes docs/performance.md.
"""
