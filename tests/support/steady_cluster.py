"""A cluster without torch that trains for ever, as a process: python -m support.steady_cluster NAME MASTER ELEMS."""

from __future__ import annotations

import sys

from support.whole_run import NumpyModel

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan
from dips.worker.config import ClientConfig
from dips.worker.driver import Driver


class Forgetful(NumpyModel):
    """Keeps nothing of what went through it."""

    def snapshot(self, into: object) -> None:
        super().snapshot(into)  # type: ignore[arg-type]
        self.pushed.clear()

    def install(self, flat: object) -> None:
        super().install(flat)  # type: ignore[arg-type]
        self.installed.clear()


def main(name: str, master: str, n_elems: int) -> None:
    layout = Layout((Parameter("w", (n_elems,), "float32", "w"),), block_elems=n_elems // 4)
    model = Forgetful(sum(name.encode()), layout)
    with Driver(
        ClientConfig(cluster_id=name, master=master, insecure=True), model, layout, DataPlan(DataMode.OWN)
    ) as driver:
        while not driver.done:
            driver.step(10, loss=model.step())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
