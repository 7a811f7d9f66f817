"""The status page of a run on this machine: on unless it is switched off, at a free port of loopback."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from dips.core.release import how_to_install
from dips.local.processes import RunPlan
from dips.local.tapes import HELDOUT_TAPE, tape_path

LISTEN = "127.0.0.1:0"
WITHOUT = f"no status page: aiohttp is not installed ({how_to_install('master')})"


def with_page(plan: RunPlan, run_dir: Path) -> RunPlan:
    """The plan with a page that draws the evaluator's losses too; an address that the settings give is kept."""
    if not page_can_be():
        return plan  # page_sentence says so
    page: dict[str, object] = {"page_listen": plan.master.page_listen or LISTEN}
    if plan.evaluate is not None and plan.master.page_heldout is None:
        page["page_heldout"] = tape_path(run_dir, HELDOUT_TAPE)
    return dataclasses.replace(plan, master=plan.master.model_copy(update=page))


def without_page(plan: RunPlan) -> RunPlan:
    """The plan without one, whatever the settings say."""
    return dataclasses.replace(plan, master=plan.master.model_copy(update={"page_listen": None}))


def page_can_be() -> bool:
    """Whether its server is installed."""
    return importlib.util.find_spec("aiohttp") is not None


def page_sentence(url: str | None, wanted: bool) -> str:
    """The launcher's sentence about the page; empty when none was wanted."""
    if url is not None:
        return f"the status page is at {url}"
    return WITHOUT if wanted else ""
