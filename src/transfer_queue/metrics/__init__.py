"""What servers measure of themselves, and how Prometheus reads it. Pure: times come in as readings of a clock.

timing      histograms and longest events, kept by every server all the time
families    every metric: its name, kind, meaning and labels
snapshot    what one scrape has collected
exposition  that as text; `node/controller/metrics_collector.py` collects it, `node/controller/metrics_http.py` serves
it
"""
