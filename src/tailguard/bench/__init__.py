"""Short measurements of speed: what `tailguard bench` runs, and what the files in benchmarks/ share."""
