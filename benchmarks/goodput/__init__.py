"""Which share of the clusters' compute becomes trained tokens, in Di-PS and in other systems (bench_goodput.py)."""
