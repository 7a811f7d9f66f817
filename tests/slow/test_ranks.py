"""What a process imports for its trainer, and how a rank says its error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.dips_command import environment

from dips.core.errors import ConfigError

WITHOUT = """
import sys
sys.modules["transformers"] = sys.modules["lightning.pytorch"] = sys.modules["lightning"] = None
import dips
from dips.core.errors import ConfigError
for name in ("HuggingFaceCallback", "LightningCallback"):
    try:
        getattr(dips, name)
    except ConfigError as error:
        print(error)
"""

LAZY = """
import sys
import dips.worker.loop, dips.local.model_folder
heavy = {"transformers", "accelerate", "lightning", "pytorch_lightning"} & set(sys.modules)
print(sorted(heavy))
import dips
assert "torch" in sys.modules
"""


def said_by(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_trainer_names_the_extra_and_none_is_loaded() -> None:
    said = said_by(WITHOUT)
    assert "needs transformers: pip install '.[huggingface]'" in said
    assert "pip install '.[lightning]'" in said
    assert said_by(LAZY) == "[]\n"


def test_a_rank_says_its_error_through_the_hook_of_torch_distributed(tmp_path: Path) -> None:
    """init_process_group() puts a hook around the one that was there, and prints what that one has, if it returns."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import torch, torch.distributed as dist, dips\n"
        "loop, model = dips.DiLoCo, torch.nn.Linear(2, 2)\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "loop(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens_per_step=0)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], env=environment({}), capture_output=True, text=True)
    assert ended.returncode == ConfigError.exit_code
    assert ended.stderr.startswith("dips: tokens_per_step is 0")
    assert ended.stderr.endswith("(rank.py, line 4)\n")
