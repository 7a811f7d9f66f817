"""torchrun for the ranks of a cluster: `python -m dips.worker.torchrun` takes torchrun's own arguments.

torchrun itself ends with 1 whatever its processes ended with. What starts a cluster again must know whether that can
help (a dead rank, a lost node), or whether a person must act (a wrong setting), so this one ends with the code of the
rank that failed. And each attempt gets a store of its own, so that a new node can join those that lost one.

`--for-srun` as the first argument, for several nodes under srun: 202 and 208 in place of 2 and 8, where a person must
act. srun ends with the highest code of its tasks, and the nodes that lost this one end with 6 or 143. Where it has to
kill one of them it ends with 137 all the same (seen with 22.05), so the job's script gets the code as a signal, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence

from dips.core.errors import KEYS_REFUSED_EXIT, NAME_TAKEN_EXIT, ConfigError, FatalError
from dips.core.observe.logs import say_last

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torchrun's variable. Without it the nodes that are left keep the address of their first attempt's store, and tell it
to no one: a node that comes later waits for it until its time is over (seen with torch 2.13).
"""

A_PERSON_MUST_ACT = (ConfigError.exit_code, NAME_TAKEN_EXIT, KEYS_REFUSED_EXIT)

FOR_SRUN, ADDED_FOR_SRUN = "--for-srun", 200

FIRST_SIGNAL = 34
"""The shell's RTMIN, of glibc. The script has a trap for this number and each code after which a person must act."""


def exit_code(codes: Iterable[int]) -> int:
    """The exit code of a node whose ranks ended so, the first to fail first. A process that a signal ended has minus
    its number, as subprocess has it; here it becomes 128 and the number, as shells have it.
    """
    ends = [code if code > 0 else 128 - code for code in codes if code]
    return next((code for code in ends if code in A_PERSON_MUST_ACT), ends[0] if ends else 0)


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this node to their end; returns the exit code. Ends with SystemExit for wrong arguments."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault(OWN_STORES, "1")
    for_srun = arguments[:1] == [FOR_SRUN]
    try:
        run(parse_args(list(arguments[for_srun:])))
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
        code = exit_code(failure.exitcode for _, failure in failures)
        ends = ", ".join(f"rank {rank} with {failure.exitcode}" for rank, failure in sorted(failures))
        say_last(f"ranks of this node ended ({ends}): their own last lines say why")
        if not for_srun or code not in A_PERSON_MUST_ACT:
            return code
        command = ["scancel", "--batch", f"--signal={FIRST_SIGNAL + code}", os.environ.get("SLURM_JOB_ID", "")]
        with contextlib.suppress(OSError):
            subprocess.run(command, check=False)
        return code + ADDED_FOR_SRUN
    except SignalException as error:
        return 128 + int(signal.Signals(error.sigval))
    except (RendezvousError, DistError) as error:
        say_last(f"this node does not find, or has lost, the other nodes of its cluster: {str(error) or repr(error)}")
        return FatalError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
