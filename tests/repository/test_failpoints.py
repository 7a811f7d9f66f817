"""Each failpoint that the product calls is registered: faults/test_fault_matrix.py plans a fault at each name, and
fails where it does not strike."""

from __future__ import annotations

import re

from support.repository import SOURCE, modules

from dips.core.observe.failpoints import all_names, expand

WITH_PLACES_OF_CALLERS = SOURCE / "core" / "files.py"


def test_a_name_that_is_called_is_registered() -> None:
    texts = [path.read_text() for path in modules() if path != WITH_PLACES_OF_CALLERS]
    called = {name for text in texts for name in re.findall(r'\bfailpoint\(\s*f?"([^"]+)"', text)}
    assert len(called) > 50
    assert not {name for name in called if not {*expand(name)} <= {*all_names()}}
