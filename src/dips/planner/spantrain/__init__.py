"""SpanTrain's planner (Wang et al., section 3.3): one pipeline over groups of unequal devices and slow links.

`work` says what layers cost on each kind of device, `inside` plans the devices of one group (the second level),
`search` orders the groups and gives each its layers (the first level, Equation 1, Algorithm 1), `flowing` is the
out-of-order variant of the schedule, `report` is the answer. `dips.planner.grouping` makes the groups.
"""
