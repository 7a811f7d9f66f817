"""`dips page`: where a run's status page is."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from dips.core.errors import ConfigError
from dips.local.operator_client import NamedRun
from dips.master.page.access import read_page_url


def page(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run on this machine.")],
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> int:
    """Print the address of a run's status page. Whoever has the address may look at the page while the run lives.

    A page in TLS has the certificate of the run's own authority, which a browser does not know: it asks once.
    """
    named = NamedRun.of(run)
    named.check_alive()
    url = read_page_url(named.masters)
    if url is None:
        raise ConfigError(f"the master in {run} serves no page: start it with --page-listen 127.0.0.1:0")
    print(url)
    if open_it and not webbrowser.open(url):
        raise ConfigError("no browser can be started here: open the address above in one on your own machine")
    return 0
