"""torchtitan's Llama in one process and a loop of one's own: `python titan_plain.py FOLDER`; the run stands in the
environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.byte_tokenizer import byte_tokenizer
from support.three_facts import note, trained_parameters
from support.titan_files import BATCH, LENGTH, model_arguments, texts
from support.titan_on_cpu import llama3

import dips

if __name__ == "__main__":
    torch.set_num_threads(1)
    ids = torch.tensor(byte_tokenizer().encode("\n".join(texts())).ids)
    model = llama3.Transformer(model_arguments(llama3.TransformerModelArgs))
    with torch.no_grad():
        model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = []
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH * LENGTH) as sync:
        while not sync.done:
            rows = ids[torch.randint(len(ids) - LENGTH - 1, (BATCH, 1)) + torch.arange(LENGTH + 1)]
            loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            sync.report(loss)
            optimizer.step()
            optimizer.zero_grad()
            tokens.append(BATCH * LENGTH)
    note(Path(sys.argv[1]), trained_parameters(model), tokens)
