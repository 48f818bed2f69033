"""Alerts that are changed in the config file while its server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from specserve.config.load import Loaded, load
from specserve.config.schema import Settings
from specserve.errors import ConfigError
from specserve.files import read_small

LOG = logging.getLogger("specserve.sidecar")


class ChangingAlerts:
    """The section ``alerts`` of a config file, as the file has it now.

    All other sections are what the engine was started with, and for its next start.
    """

    def __init__(self, loaded: Loaded, environ: Mapping[str, str]) -> None:
        self._loaded, self._environ = loaded, dict(environ)
        self._settings = loaded.settings
        self._text = self._read()

    def changed(self) -> Settings | None:
        """The settings with other alerts, once for each change; None where there is none to take.

        A file that cannot be used is named once, and what is in force stays.
        """
        text = self._read()
        if text is None or text == self._text:
            return None
        self._text = text
        path = self._loaded.path
        try:
            found = load(path, environ=self._environ, overrides=self._loaded.overrides).settings
        except ConfigError as error:
            LOG.warning(
                "%s has changed and cannot be used; alerts stay as they are: %s", path, error
            )
            return None
        if found.alerts == self._settings.alerts:
            return None
        self._settings = self._settings.model_copy(update={"alerts": found.alerts})
        return self._settings

    def _read(self) -> str | None:
        """The file's text; None where it cannot be read again, as a pipe of the shell."""
        try:
            return read_small(self._loaded.path)
        except (OSError, UnicodeDecodeError):
            return None
