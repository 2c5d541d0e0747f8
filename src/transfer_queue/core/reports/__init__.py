"""What people and dashboards ask for: status, explanations, metrics."""
