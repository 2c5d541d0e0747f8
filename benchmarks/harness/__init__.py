"""The shared code of the benchmarks: runner, systems and processes, reference measurements, payloads, and report."""
