"""The shape of the package: imports go one way, each danger has one home, nothing grows without bound."""

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
    {"__init__", "errors", "units", "findings", "log", "families", "gpu"},
    {"config", "pair"},
    {"engine"},
    {"supervise", "sidecar", "alert", "bench"},
    {
        "preflight",
        "codes",
        "doctor",
        "launching",
        "serve",
        "watch",
        "planning",
        "arm",
        "measure",
        "verify",
        "calibration",
    },
    {"commands"},
    {"cli", "__main__"},
]
"""Top-level names, lowest first: a module imports its own level or a lower one."""
PEERS = {"supervise", "sidecar", "alert", "bench"}
"""These never import one another: a wire between them belongs to serve or watch."""


def top(module: str) -> str:
    """The name below ``specserve`` that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | (
                {f"specserve.{a.name}" for a in node.names} if node.module == "specserve" else set()
            )
    return {m for m in found if m.split(".")[0] == "specserve"}


def level(name: str) -> int:
    return next(i for i, names in enumerate(LEVELS) if name in names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    """No module imports a higher level, and the four peers know nothing of one another."""
    own = top(name_of(path))
    for module in imports(path):
        other = top(module)
        if other == "__version__":
            continue
        assert level(other) <= level(own), f"{name_of(path)} imports {module}"
        assert not (own in PEERS and other in PEERS and own != other), f"{name_of(path)} imports {module}"


HOMES = {
    r"\bsys\.exit\(": {"cli.py", "engine/probe_vllm.py"},
    r"\bclick\.(echo|secho|style)\(": {"cli.py", "commands/"},
    r"(?<!\.)\bprint\(": {"engine/probe_vllm.py", "bench/client_worker.py"},
    r"\bos\.environ\b|\bos\.getenv\b": {
        "config/load.py",
        "engine/environment.py",
        "engine/repairs.py",
        "engine/auth.py",
        "commands/",
    },
    r"\bsignal\.signal\(": {"supervise/supervisor.py", "commands/options.py"},
    r"\bsubprocess\.Popen\(": {"supervise/child.py", "bench/load.py"},
    r"[\"']vllm:": {"engine/metrics.py"},
    r"^\s*(import|from) (torch|transformers|vllm)\b": {
        "engine/probe_vllm.py",
        "engine/repairs.py",
        "bench/client_worker.py",
    },
    # tokenizers' native panics are no Exception: pair/tokenizer_files.py turns them into a finding, and lets ^C pass.
    r"except\s*(Exception|BaseException)?\s*:|except (Exception|BaseException) as": {
        "cli.py",
        "watch.py",
        "pair/tokenizer_files.py",
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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_stay_small(path: Path) -> None:
    """A module has at most 350 lines, a function at most 60."""
    text = path.read_text()
    assert text.count("\n") <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 60, f"{name_of(path)}.{node.name}"


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


def test_changelog_is_of_this_version() -> None:
    """The newest heading of the changelog is the version of the package."""
    from specserve import __version__

    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] in (__version__, "Unreleased")


def test_exit_codes_in_the_readme_are_those_of_the_code() -> None:
    """The README's table of exit codes lists every code, and no other."""
    from specserve.errors import ExitCode

    rows = re.findall(r"^\| (\d+) \| ", (ROOT / "README.md").read_text(), re.M)
    assert sorted(int(r) for r in rows) == sorted(int(c) for c in ExitCode)
