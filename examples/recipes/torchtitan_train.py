"""torchtitan's own trainer, from its own configuration, as one cluster of a run (torchtitan 0.2.2).

`torchrun --standalone --nproc_per_node 8 torchtitan_train.py --job.config_file FILE.toml` trains alone, as torchtitan's
train.py does, on any of its parallelisms; as clusters of a run: README.md of this folder. It reads its dataset from the
beginning: give each cluster a `training.dataset_path` of its own.
"""

import torchtitan.train

import dips


class Trainer(torchtitan.train.Trainer):
    def train(self):
        training = self.job_config.training
        tokens = self.gradient_accumulation_steps * training.local_batch_size * training.seq_len
        with dips.DiLoCo(self.model_parts, self.optimizers, tokens_per_step=tokens) as self.sync:
            super().train()

    def should_continue_training(self):
        return super().should_continue_training() and not self.sync.done


if __name__ == "__main__":
    torchtitan.train.main(Trainer)
