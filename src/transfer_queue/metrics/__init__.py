"""The measurements of servers, and their form for Prometheus. No module reads a clock.

timing       histograms and longest events, which every server always measures
snapshot     the measurements of one scrape; `node/controller/metrics_collector.py` collects them
samples      functions from a snapshot to the samples of a metric
declaration  the form of a declaration of a metric
families     every metric: its name, kind, meaning, labels, samples and panel of the dashboard
compatible   further metrics, under the names that existing dashboards query
exposition   converts a snapshot to text; `node/controller/metrics_http.py` serves it
"""
