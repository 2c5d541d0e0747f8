"""What users pass becomes arguments of operations, and replies become what users get."""
