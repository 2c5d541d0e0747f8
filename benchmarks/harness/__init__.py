"""What the benchmarks share: the runner, systems and processes, reference measurements, payloads, and the report."""
