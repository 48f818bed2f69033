"""Prepare models without a hub: `python scripts/prepare_models.py [smollm2] [tiny]`, both without a name.

Every model is built in a temporary folder and renamed when it is whole, so an interrupted run leaves
nothing half-done, and a model whose recipe has not changed is not built again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_ROOT = HERE.parent / ".cache" / "models"
STAMP = "specserve-recipe.json"


def recipe_hash(*sources: str) -> str:
    """Hash of the files that decide what a model becomes."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update((HERE / "models" / source).read_bytes())
    return digest.hexdigest()[:16]


def is_ready(folder: Path, recipe: str) -> bool:
    """Whether `folder` holds the whole model of this recipe."""
    stamp = folder / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()).get("recipe") == recipe


def prepare(folder: Path, recipe: str, build: Callable[[Path], None]) -> None:
    """Build into a sibling and rename, unless the model is there."""
    if is_ready(folder, recipe):
        print(f"{folder.name}: ready", flush=True)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left_over)
    print(f"{folder.name}: building", flush=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    work.chmod(0o755)
    build(work)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; a container's user must be able to read
    (work / STAMP).write_text(json.dumps({"recipe": recipe}) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    work.rename(folder)
    print(f"{folder.name}: done", flush=True)


def prepare_tiny(root: Path) -> None:
    """The tiny pair, and the bad draft."""
    recipe = recipe_hash("text.py", "tiny.py")
    names = ("tiny-target", "tiny-draft", "tiny-draft-bad")
    if all(is_ready(root / name, recipe) for name in names):
        print("tiny pair: ready", flush=True)
        return
    from models import tiny

    for made in (tiny.BAD_DRAFT, tiny.DRAFT, tiny.TARGET):
        prepare(root / made.name, recipe, lambda folder, made=made: tiny.build(made, folder))  # type: ignore[misc]
    rate = tiny.measure(root / "tiny-target", root / "tiny-draft")
    print(
        f"tiny pair: acceptance rate {rate:.0%} at 3 tokens per draft, greedy, held-out text",
        flush=True,
    )


def prepare_smollm2(root: Path) -> None:
    """SmolLM2-135M-Instruct."""
    folder, recipe = root / "smollm2-135m", recipe_hash("smollm2.py")
    if is_ready(folder, recipe):
        print(f"{folder.name}: ready", flush=True)
        return
    from models import smollm2

    prepare(folder, recipe, lambda work: smollm2.build(work, downloads=root / "downloads"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tiny, smollm2; default: both")
    parser.add_argument(
        "--root", type=Path, default=DEFAULT_ROOT, help="folder that holds the models"
    )
    args = parser.parse_args()
    makers = {"tiny": prepare_tiny, "smollm2": prepare_smollm2}
    if unknown := [name for name in args.names if name not in makers]:
        parser.error(f"no model is called {unknown[0]!r}; known: {', '.join(makers)}")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar in a log file is noise
    for name in args.names or makers:
        makers[name](args.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
