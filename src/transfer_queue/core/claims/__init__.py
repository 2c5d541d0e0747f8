"""Requests that take samples: claims, leases and what becomes of them."""
