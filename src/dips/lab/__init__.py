"""The laboratory: runs under a virtual clock (sim), methods next to each other (compare), and their commands."""
