"""The master: rounds, membership, verdicts, leases. Never holds parameters."""

import os

# gRPC would write a line for each stranger whose handshake fails. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if __name__ != "dips.master":
    raise ImportError(
        f"import dips.master, not {__name__}: the link at the top of the repository leads to the same code "
        "under a second name"
    )
