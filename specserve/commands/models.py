"""``specserve models``: pin, verify and download the files of both models."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specserve.commands.check import hashing
from specserve.commands.options import answer, config_command, follows, format_option, same_config

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.checkpoint.facts import ModelFacts
    from specserve.config.load import Loaded
    from specserve.config.schema import Settings
    from specserve.findings import Finding


@click.group("models")
def models() -> None:
    """Pin, verify and download the model files."""


@models.command("lock")
@functools.partial(config_command, asks_checkpoints=False)
@format_option
def lock(loaded: Loaded, output: str) -> None:
    """Write sizes and SHA-256 of both models to CONFIG's .lock.json."""
    from specserve.checkpoint import lock as integrity
    from specserve.files import write_whole
    from specserve.units import size as text_of

    facts = _facts(loaded.settings)
    with hashing(integrity.bytes_to_hash(facts)) as progress:
        manifest = integrity.lock(facts, progress)
    path = integrity.lock_path(loaded.path)
    write_whole(path, manifest.to_json())
    files = sum(len(records) for records in manifest.models.values())
    if output == "json":
        answer({"lock": str(path), "files": files, "models": list(manifest.models)})
        return
    size = sum(record.size for records in manifest.models.values() for record in records.values())
    models = "1 model"
    if len(manifest.models) > 1:
        models = f"{len(manifest.models)} models"
    click.echo(f"{path}: locked {files} files of {models}, {text_of(size)}")
    follows(f"specserve check {same_config(loaded)}")


@models.command("verify")
@functools.partial(config_command, asks_checkpoints=False)
@format_option
def verify(loaded: Loaded, output: str) -> None:
    """Compare both models with .lock.json and models.*.sha256.

    Exit code 3 when they differ.
    """
    from specserve.checkpoint import lock as integrity
    from specserve.errors import ConfigError, PreflightRefused

    settings = loaded.settings
    facts = _facts(settings)
    found: list[Finding] = []
    path = integrity.lock_path(loaded.path)
    expected = {key: getattr(settings.models, key).sha256 for key in facts}
    if not path.exists() and not any(expected.values()):
        message = "there is nothing to verify against: no manifest, no models.*.sha256"
        raise ConfigError(message, where=str(path), fix=f"specserve models lock {loaded.path}")
    with hashing(integrity.bytes_to_hash(facts)) as progress:
        for key, model in facts.items():
            found += integrity.check(model, expected[key], f"models.{key}", progress)
        if path.exists():
            found += integrity.verify(integrity.read_manifest(path), facts, progress)
    if found:
        raise PreflightRefused([f.as_problem() for f in found])
    if output == "json":
        answer({"models": {key: model.path for key, model in facts.items()}})
        return
    click.echo(f"OK {', '.join(model.path for model in facts.values())}")
    follows(f"specserve launch {same_config(loaded)} --dry-run")


@models.command("pull")
@functools.partial(config_command, asks_checkpoints=False)
@format_option
def pull(loaded: Loaded, output: str) -> None:
    """Download both models to models.store, or the Hub cache.

    A model appears under its name when it is whole.
    """
    settings = loaded.settings
    places: dict[str, JsonValue] = {}
    for key, path, revision in _configured(settings):
        if "://" not in path and Path(path).expanduser().exists():
            where, said = path, f"{path} is here already"
        else:
            where = str(_pull(settings, path, revision))
            said = f"{path} -> {where}\nset models.{key}.path: {where}"
        places[f"models.{key}.path"] = where
        if output == "text":
            click.echo(said)
    if output == "json":
        answer({"set": places})
        return
    follows(f"specserve models lock {same_config(loaded)}", err=True)


def _pull(settings: Settings, path: str, revision: str | None) -> Path:
    from specserve.checkpoint import pull as pulling
    from specserve.checkpoint import read as checkpoint
    from specserve.checkpoint.access import access
    from specserve.errors import ConfigError

    store = None
    if settings.models.store:
        store = Path(settings.models.store)
    if "://" in path and checkpoint.hub_id(path) is None:
        if store is None:
            raise ConfigError(
                "models.store must name the folder to copy to", where=path, fix="set models.store"
            )
        with hashing() as progress:
            return pulling.from_place(path, store=store, progress=progress)
    reached = access(settings, os.environ)
    resolved = checkpoint.read(path, revision=revision, access=reached)
    if store is None or resolved.revision is None:
        return pulling.to_cache(path, revision=revision, commit=resolved.revision, access=reached)
    return pulling.from_hub(path, revision=resolved.revision, store=store, access=reached)


def _configured(settings: Settings) -> list[tuple[str, str, str | None]]:
    target, draft = settings.models.target_model, settings.models.draft_model
    found = [("target_model", target.path, target.revision)]
    if draft is not None:
        found.append(("draft_model", draft.path, draft.revision))
    return found


def _facts(settings: Settings) -> dict[str, ModelFacts]:
    from specserve.checkpoint import read as checkpoint
    from specserve.checkpoint.access import access

    reached = access(settings, os.environ)
    return {
        key: checkpoint.read(path, revision=rev, access=reached)
        for key, path, rev in _configured(settings)
    }
