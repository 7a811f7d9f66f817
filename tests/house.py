"""python tests/house.py: how the source is divided, as numbers. Prints them; no test holds a limit.

Counted are the modules of src/dips without the generated stubs. A line is a line of a file, blank ones and comments
too. An importer is another module that imports this one. A cycle is a set of modules that import each other.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.repository import SOURCE, modules


def name_of(path: Path) -> str:
    parts = ["dips", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield node.module


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected sets of more than one module (Tarjan's algorithm), the largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        path.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in path:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = path.index(node)
            found.append(sorted(path[at:]))
            del path[at:]

    for node in edges:
        if node not in index:
            visit(node)
    return sorted((group for group in found if len(group) > 1), key=len, reverse=True)


def comments_in(text: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/house.py", description=__doc__)
    parser.add_argument(
        "--list", action="store_true", help="name the modules with one importer, the doubles, the cycles"
    )
    options = parser.parse_args(arguments)
    known = {name_of(path): path for path in modules()}
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    edges = {name: set(imported(tree, known)) - {name} for name, tree in trees.items()}
    importers = Counter(other for found in edges.values() for other in found)
    functions = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for tree in trees.values() for node in ast.walk(tree)
    )
    places = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    doubles = {cls: where for cls, where in places.items() if len(where) > 1}
    total = sum(lines.values())
    alone = sorted(name for name in known if importers[name] == 1 and not name.endswith("__main__"))
    rings = cycles(edges)
    comments = sum(comments_in(path.read_text()) for path in known.values())
    print(f"modules                          {len(known)}")
    print(f"lines                            {total}")
    print(f"modules under 60 lines           {sum(n < 60 for n in lines.values())}")
    print(f"functions in 1,000 lines         {1000 * functions / total:.1f}")
    print(f"class names that occur twice     {len(doubles)}")
    print(f"modules with one importer        {len(alone)}")
    print(f"comments in 100 lines            {100 * comments / total:.2f}")
    print(f"import cycles                    {len(rings)}, of {[len(ring) for ring in rings]} modules")
    if options.list:
        print("\none importer:", *alone, sep="\n  ")
        print("\ntwice:", *(f"{cls}: {', '.join(where)}" for cls, where in sorted(doubles.items())), sep="\n  ")
        print("\ncycles:", *(" ".join(ring) for ring in rings), sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
