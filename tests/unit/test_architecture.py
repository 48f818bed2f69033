"""The shape of the package: imports go one way, each danger has one home."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "specserve"
MODULES = sorted(PACKAGE.rglob("*.py"))

LEVELS = [
    {"units"},
    {"errors"},
    {"findings"},
    {"log"},
    {"files"},
    {"metric_families"},
    {"config", "gpu"},
    {"checkpoint", "alert"},
    {"pair"},
    {"engine"},
    {"memory", "supervise", "sidecar", "bench"},
    {"app"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""Names at the top of the package, lowest first. A module imports lower levels and its own package, never a
neighbour on its level: a wire between supervisor and sidecar belongs to the app."""

INSIDE = "specserve.engine.inside"
INSIDE_MAY_IMPORT = {"specserve.engine.command.environment", INSIDE}
"""Code inside vLLM's interpreter loads nothing of ours but the names of our environment variables."""


def top(module: str) -> str:
    """The name below ``specserve`` that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}


def imported_by(source: str) -> set[str]:
    """Modules of this package that a source imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in NAMES else node.module for member in members}
    return {module for module in found if module.split(".")[0] == "specserve"}


def level(name: str) -> int:
    """Raises LookupError for a package that the table does not know."""
    for number, names in enumerate(LEVELS):
        if name in names:
            return number
    raise LookupError(f"'{name}' has no level in LEVELS")


def upward(module: str, imports: set[str]) -> list[str]:
    """The imports of a module that go up, or to a neighbour on its level."""
    own = top(module)
    if own == "__init__":
        return sorted(imports - {"specserve"})
    wrong = []
    for other in sorted(imports - {"specserve"}):
        up = top(other) != own and level(top(other)) >= level(own)
        out = module.startswith(INSIDE) and not other.startswith(tuple(INSIDE_MAY_IMPORT))
        if up or out:
            wrong.append(other)
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    """No module imports its own level or a higher one outside its package."""
    assert upward(name_of(path), imported_by(path.read_text())) == []


PACKAGES = sorted({top(name) for name in NAMES} - {"__init__"})


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "__main__"])
def test_an_upward_import_is_found_in_every_package(package: str) -> None:
    """A planted import of the level above, or of a neighbour, is reported for each package and root module."""
    own = level(package)
    above = {name for names in LEVELS[own + 1 :] for name in names}
    for other in above | (LEVELS[own] - {package}):
        planted = {f"specserve.{other}.planted"}
        assert upward(f"specserve.{package}.some_module", planted) == sorted(planted)


def test_a_package_without_a_level_is_an_error() -> None:
    """A new package has to be given its level before anything may import it."""
    with pytest.raises(LookupError, match="helpers"):
        upward("specserve.app.launch", {"specserve.helpers"})


def test_the_inside_of_the_engine_stays_apart() -> None:
    """A planted import of the engine's other wings into code that runs in vLLM is reported."""
    assert upward(f"{INSIDE}.auth", {"specserve.engine.http.client", "specserve.errors"}) != []


def test_no_import_circles() -> None:
    """Modules import one another without a circle, imports inside functions and for types included."""
    edges = {name_of(path): imported_by(path.read_text()) & NAMES for path in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for other in sorted(edges[module]):
            visit(other, (*trail, module))
        done.add(module)

    for module in sorted(edges):
        visit(module, ())


HOMES = {
    r"\bsys\.exit\(": {"cli.py", "engine/inside/probe_vllm.py"},
    r"\bclick\.(echo|secho|style)\(": {"cli.py", "commands/"},
    r"(?<!\.)\bprint\(": {"engine/inside/probe_vllm.py", "engine/inside/client_worker.py"},
    r"\bos\.environ\b|\bos\.getenv\b": {
        "config/load.py",
        "engine/command/environment.py",
        "engine/inside/repairs.py",
        "engine/inside/auth.py",
        "commands/",
    },
    r"\bsignal\.signal\(": {
        "__main__.py",
        "supervise/supervisor.py",
        "commands/options.py",
        "engine/inside/draining.py",
    },
    r"\bsubprocess\.Popen\(": {"supervise/child.py", "bench/load.py"},
    r"[\"']vllm:": {"engine/http/metrics.py"},
    r"^\s*(import|from) (torch|transformers|vllm)\b": {
        "engine/inside/probe_vllm.py",
        "engine/inside/repairs.py",
        "engine/inside/client_worker.py",
        "engine/inside/control_vllm.py",
    },
    # tokenizers' native panics are no Exception: checkpoint/tokenizer.py turns them into a finding, and lets ^C pass.
    # engine/inside/control_vllm.py: whatever fails in ours, the engine must serve on.
    r"except\s*(Exception|BaseException)?\s*:|except (Exception|BaseException) as": {
        "cli.py",
        "app/sidecar.py",
        "checkpoint/tokenizer.py",
        "engine/inside/control_vllm.py",
    },
}
"""Pattern -> files (or folders) where it may stand. Code that runs inside the engine process has its own rules."""


@pytest.mark.parametrize("pattern", HOMES)
def test_each_danger_has_one_home(pattern: str) -> None:
    """Exits, environment, signals, processes and the engine's names each stand in one known place."""
    strays = [
        f"{path.relative_to(PACKAGE)}:{i}: {line.strip()}"
        for path in MODULES
        if not any(str(path.relative_to(PACKAGE)).startswith(home) for home in HOMES[pattern])
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert strays == []


def test_one_thought_a_line() -> None:
    """In 1,000 lines at most 12 conditional and 4 assignment expressions; lines of at most 100."""
    texts = [path.read_text() for path in MODULES]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    lines = [line for text in texts for line in text.splitlines()]
    thousands = len(lines) / 1000
    assert sum(isinstance(node, ast.IfExp) for node in nodes) / thousands <= 12
    assert sum(isinstance(node, ast.NamedExpr) for node in nodes) / thousands <= 4
    assert [line for line in lines if len(line) > 100] == []


def test_class_names_are_unique() -> None:
    """A class name means one thing in the whole package."""
    names = [
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_drawer_modules() -> None:
    """No module is a drawer for whatever has no name."""
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert [p for p in MODULES if p.stem in drawers] == []


def test_help_imports_nothing_heavy() -> None:
    """``specserve --help`` loads click and the standard library, no schema, no network, no engine."""
    code = (
        "import sys, specserve.cli; "
        "heavy = {'pydantic', 'yaml', 'requests', 'rich', 'prometheus_client', 'tokenizers', 'huggingface_hub',"
        " 'torch', 'vllm', 'numpy', 'psutil', 'pynvml'}; "
        "print(sorted(heavy & {m.split('.')[0] for m in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_exit_codes_in_the_readme_are_those_of_the_code() -> None:
    """The table of exit codes in docs/cli.md lists every code, and no other."""
    from specserve.errors import ExitCode

    rows = re.findall(r"^\| (\d+) \| ", (ROOT / "docs/cli.md").read_text(), re.M)
    assert sorted(int(r) for r in rows) == sorted(int(c) for c in ExitCode)
