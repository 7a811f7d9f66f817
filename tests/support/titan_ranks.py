"""torchtitan's own trainer as a cluster's program; the run stands in the environment.

    torchrun --standalone --nproc_per_node 2 titan_ranks.py --job.config_file FOLDER/settings.toml

The trainer is the one that docs/integrations.md prints; support/titan_files.py has written the files in FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.documents import blocks_below
from support.repository import ROOT
from support.three_facts import note
from support.titan_files import model_arguments
from support.titan_on_cpu import llama3, train


def noted(trainer: type[Any], folder: Path) -> type[Any]:
    """A trainer that writes at its end what the cluster holds, and the tokens of all ranks in each step."""

    class Noted(trainer):  # type: ignore[misc]
        def train_step(self, data_iterator: Iterator[Any]) -> None:
            before = self.ntokens_seen
            super().train_step(data_iterator)
            self.of_steps.append((self.ntokens_seen - before) * torch.distributed.get_world_size())

        def train(self) -> None:
            self.of_steps: list[int] = []
            super().train()
            (model,) = self.model_parts
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if torch.distributed.get_rank() == 0:
                note(folder, {name: t for name, t in whole.items() if isinstance(t, torch.Tensor)}, self.of_steps)

    return Noted


if __name__ == "__main__":
    torch.set_num_threads(1)
    llama3.llama3_args["small"] = model_arguments(llama3.TransformerModelArgs)
    main, folder = train.main, Path(sys.argv[-1]).parent
    train.main = lambda trainer: main(noted(trainer, folder))
    printed = blocks_below(ROOT / "docs" / "integrations.md", "torchtitan")
    (program,) = [block for block in printed if block.language == "python"]
    exec(program.text, {})
