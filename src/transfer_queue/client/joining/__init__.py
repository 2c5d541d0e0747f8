"""The operations of one client that travel together: puts, gets and acknowledgements of one sample each."""
