"""ScaleAcross Explorer (Li et al., 2026): how to split the training of one model over buildings and regions.

`topology` reads what there is, `iteration` rebuilds the time of an iteration
(Algorithm 1), `search` looks for the best configuration, `network` recommends how the long links are used. All of it
is computation; what the paper leaves out is an assumption of the file, with its source.
"""
