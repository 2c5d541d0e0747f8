"""Requests that consume samples: claims, leases and acknowledgements."""
