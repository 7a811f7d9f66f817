"""Five papers and what this project does of them: every figure and table with its own command (`make papers`).

A source is a command that prints JSON; what it says about a figure is a list of findings. How a finding was made
follows from its command alone, so that nothing that was computed can be called measured.
"""
