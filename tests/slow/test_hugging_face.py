"""The callback in Hugging Face's own Trainer, over real sockets: a killed training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_for_workers import RunForWorkers
from support.trainer_models import ACCUMULATED, BATCH, Killed, Model, Rows, check_resumed, kill
from transformers import Trainer, TrainerCallback, TrainingArguments

import dips

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch's own: a loader that would pin memory on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class KillAt(TrainerCallback):
    """Ends a training at a step as if its process had been killed."""

    def __init__(self, step: int, ours: dips.HuggingFaceCallback) -> None:
        self._step, self._ours = step, ours

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._step:
            kill(self._ours)


def trainer(folder: Path, *callbacks: TrainerCallback, seed: int = 1, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(folder / "trainer"), "per_device_train_batch_size": BATCH, "max_steps": 10,
        "gradient_accumulation_steps": ACCUMULATED, "learning_rate": 0.01, "logging_steps": 2, "save_strategy": "no",
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    arguments = TrainingArguments(**given | changes)
    return Trainer(
        Model(seed),
        arguments,
        train_dataset=Rows(),
        callbacks=list(callbacks),
    )


def flat(of: Trainer) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert isinstance(of.model, Model)
    return of.model.flat()


@pytest.mark.parametrize("killed_at", [6, 9])
def test_a_killed_training_goes_on(tmp_path: Path, new_run: Callable[[], RunForWorkers], killed_at: int) -> None:
    """At 6 inside of a round; at 9 a round further than the checkpoint (of 5): what was not saved is made again."""
    models, tokens = [], []
    for name in ("whole", "killed"):
        run = new_run()
        folder, callback = tmp_path / name, dips.HuggingFaceCallback()
        stops = [KillAt(killed_at, callback)] if name == "killed" else []
        ours = trainer(folder, callback, *stops, save_strategy="steps", save_steps=5, max_steps=18)
        if stops:
            with pytest.raises(Killed):
                ours.train()
            assert run.leaves == []
            callback = dips.HuggingFaceCallback()
            ours = trainer(folder, callback, seed=99, save_strategy="steps", save_steps=5, max_steps=18)
            ours.train(resume_from_checkpoint=True)
        else:
            ours.train()
        assert ours.state.global_step == 18
        models.append(flat(ours))
        tokens.append(run.tokens)
    check_resumed(killed_at, models, tokens)


def test_an_older_checkpoint_takes_its_own(
    new_run: Callable[[], RunForWorkers], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run()
    ours = trainer(tmp_path, dips.HuggingFaceCallback(checkpoints_kept=1), save_strategy="steps", save_steps=2)
    ours.train()
    last = np.full(30_000, 3.0, np.float32)
    run.publish(last)
    callback, look = dips.HuggingFaceCallback(checkpoints_kept=1), Look(last)
    again = trainer(tmp_path, callback, look, seed=9, save_strategy="steps", save_steps=2)
    with caplog.at_level("INFO"):
        again.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    assert "for step 4: starting without one" in caplog.text
    assert look.equal, "it pulled the newest version, and began from that"


class Look(TrainerCallback):
    """Whether the parameters were these when training began."""

    def __init__(self, wanted: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self._wanted = wanted
        self.equal = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.equal = bool(np.array_equal(given["model"].flat(), self._wanted))
