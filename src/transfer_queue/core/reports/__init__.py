"""Reports for people and dashboards: status, explanations and metrics."""
