"""The samplers in the core: which one decides a claim, and the calls of users' samplers."""
