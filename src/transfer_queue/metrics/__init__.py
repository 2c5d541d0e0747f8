"""What servers measure of themselves, and how Prometheus reads it. Pure: times come in as readings of a clock.

timing      histograms and longest events, which every server always keeps
snapshot    what one scrape has collected; `node/controller/metrics_collector.py` collects it
samples     functions from a snapshot to the samples of a metric
families    every metric: its name, kind, meaning, labels and samples
exposition  a snapshot as text; `node/controller/metrics_http.py` serves it
"""
