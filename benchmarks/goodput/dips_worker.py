"""One cluster of Di-PS: the loop of the README. DIPS_MASTER says where the master is."""

from __future__ import annotations

from training import Training, arguments

import dips


def main() -> None:
    options = arguments(__doc__, "--tape")
    training = Training(options)
    with dips.DiLoCo(
        training.model, training.model.inner, tokens_per_step=1, cluster_id=f"c{options.cluster}", tape=options.tape
    ):
        training.run()


if __name__ == "__main__":
    main()
