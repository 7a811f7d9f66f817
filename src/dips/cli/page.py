"""`dips page`: where a run's status page is."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dips.core.errors import ConfigError, RetryLater
from dips.master.directory import read_address
from dips.master.page.access import read_page_url


def page(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run on this machine.")],
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> int:
    """Print the address of a run's status page. Whoever has the address may look at the page while the run lives.

    A page in TLS has the certificate of the run's own authority, which a browser does not know: it asks once.
    """
    directory = run / "master" if (run / "master").is_dir() else run
    if not directory.is_dir():
        raise ConfigError(f"{run} is not a directory: give the directory of a run of `dips demo` or `dips up`")
    if read_address(directory) is None:
        raise RetryLater(f"no master runs in {run}: start the run")
    url = read_page_url(directory)
    if url is None:
        raise ConfigError(f"the master in {run} serves no page: start it with --page-listen 127.0.0.1:0")
    print(url)
    if open_it and not webbrowser.open(url):
        raise ConfigError("no browser can be started here: open the address above in one on your own machine")
    return 0
