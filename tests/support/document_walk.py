"""Types a document's shell blocks, one after the other, as a person with some terminals would.

A block runs to its end, unless the comment above it says `in the background` (a terminal of its own; with
`until it says: TEXT`, the next block waits for that text) or `once the background has ended`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import live
from support.dips_command import environment
from support.documents import MACHINES, Block
from support.repository import ROOT
from support.waiting import until

WRITTEN_ADDRESS = "127.0.0.1:29400"
"""The documents' address. Here every master takes a free port, and what it said replaces this one."""

BACKGROUND, ENDED, UNTIL = "in the background", "once the background has ended", ", until it says: "
NOTES = re.compile(rf"{BACKGROUND}(?:{UNTIL}\S.*)?|{ENDED}|{MACHINES}|not run: \S.*|")


class Walk:
    """Use as a context manager: processes that still run are ended when it is left. `said` grows block by block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[str, str] = {}
        self._address = ""
        self._running: list[tuple[Block, subprocess.Popen[bytes], Path]] = []
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / ".venv").symlink_to(sys.prefix)

    def __enter__(self) -> Walk:
        self._live = live.run(live.HEAVY)
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for _, process, _ in reversed(self._running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        self._live.__exit__(*error)

    def type(self, block: Block) -> None:
        """Run one block as its comment says. Raises AssertionError with what it said when it does not go well."""
        note, _, text = block.note.partition(UNTIL)
        if note == BACKGROUND:
            self._start(block, text)
            return
        if note == ENDED:
            self.wait_for_background()
        process, log = self._open(block)
        self._end(block, process, log)

    def wait_for_background(self) -> None:
        while self._running:
            self._end(*self._running.pop(0))
        self._address = ""

    def _start(self, block: Block, text: str) -> None:
        process, log = self._open(block)
        self._running.append((block, process, log))
        if text:
            until(lambda: text in log.read_text() or process.poll() is not None, f"{block} says {text!r}", log)
            assert text in log.read_text(), f"{block} ended without it:\n{log.read_text()[-3000:]}"
            told = re.search(rf"{re.escape(text)}.*?(127\.0\.0\.1:\d+)", log.read_text())
            self._address = told[1] if told else self._address

    def _open(self, block: Block) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f"block-{block.line}.log"
        words = block.text.replace(WRITTEN_ADDRESS, self._address or "127.0.0.1:0")
        with log.open("wb") as out:
            # A group of its own, so that bash and what it runs can be ended together.
            process = subprocess.Popen(
                ["bash", "-euc", words],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, log

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # examples/server.toml names the port; the environment is stronger.
        return environment({"PATH": path, "DIPS_MASTER_LISTEN": "127.0.0.1:0", "PYTHONUNBUFFERED": "1"})

    def _end(self, block: Block, process: subprocess.Popen[bytes], log: Path) -> None:
        until(lambda: process.poll() is not None, f"the end of {block}", log)
        self.said[block.text] = log.read_text()
        assert process.returncode == 0, f"{block} ended with {process.returncode}:\n{self.said[block.text][-3000:]}"
