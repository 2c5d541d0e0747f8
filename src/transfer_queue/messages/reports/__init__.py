"""Reports about the system: progress, samples, units and the timeline, and the requests that ask for them."""
