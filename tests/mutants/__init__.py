"""`make mutants`: small faults in product functions, one at a time, and whether a unit test fails for them.

faults.py makes the faults, record.py knows which tests execute which line, warm.py runs tests in forked children of a
process that has imported and collected everything once, __main__.py is the command.
"""
