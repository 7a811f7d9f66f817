"""Python imports this when it starts with tests/ on PYTHONPATH: with DIPS_SEEN_LOG, processes note what they see.

tests/conftest.py puts tests/ there for all that tests start. Nothing of the product is imported until a process itself
imports the state machines: what is imported when must be the same with and without notes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WATCHED = "dips.core.machine"


class AfterMachines(MetaPathFinder):
    """Lets a process begin its notes at the end of the first import of WATCHED."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            run = loader.exec_module

            def run_and_note(module: ModuleType) -> None:
                run(module)
                if "support.seen_notes" not in sys.modules:  # else conftest.py begins the notes
                    from support.seen_notes import note

                    note()

            loader.exec_module = run_and_note
        return spec


if os.environ.get("DIPS_SEEN_LOG"):
    sys.meta_path.insert(0, AfterMachines())

if os.environ.get("PUSHED_BLOCK_LOG"):
    from pushed_block import in_this_process

    in_this_process()
