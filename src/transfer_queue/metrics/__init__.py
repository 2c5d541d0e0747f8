"""The measurements of servers, and their form for Prometheus. No module reads a clock.

timing      histograms and longest events, which every server always measures
samples     the measurements of one scrape, which `node/controller/metrics_collector.py` collects; the form of a metric
            and functions from a scrape to its samples
families    every metric: its name, kind, meaning, labels, samples and panel of the dashboard
exposition  further metrics, under the names that existing dashboards query, and the conversion of a scrape to text,
            which `node/controller/metrics_http.py` serves
"""
