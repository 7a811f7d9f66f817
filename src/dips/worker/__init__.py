"""The code of a training cluster: client, training loop and model. Imports torch."""

import os

# A call is under way all the time, so that gRPC prepares no fork; it would print a line for each of a program's forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

if __name__ != "dips.worker":
    raise ImportError(
        f"import dips.worker, not {__name__}: the link at the top of the repository leads to the same code "
        "under a second name"
    )
