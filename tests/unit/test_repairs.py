"""What can be said of repairs without vLLM: names, log lines, and that the plugin is light and silent."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from specserve.config.schema import Settings
from specserve.engine.inside import repairs


def test_log_lines_tell_what_is_in_force():
    """Each repair once, however many processes say it; one that stepped aside is not in force."""
    line = "(EngineCore pid={}) INFO 11-29 22:59:55 [repairs.py:50] specserve repair {}: {}"
    lines = [
        line.format(1, "a-b", "applied"),
        line.format(2, "a-b", "applied"),
        line.format(2, "c-d", "not applied: this vLLM does not have the defect"),
        "INFO something else: applied",
    ]
    assert repairs.applied_in(lines) == ("a-b",)


def test_every_repair_of_the_schema_exists():
    """The config file can name exactly what there is, and by default names all."""
    by_default = Settings(models={"target_model": {"path": "t"}}).engine.repairs
    assert set(by_default) == set(repairs.available_repairs())


def test_entry_point_is_ours():
    """vLLM finds the plugin by the name that environment.py looks for in VLLM_PLUGINS."""
    (found,) = importlib.metadata.entry_points(
        group="vllm.general_plugins", name="specserve_repairs"
    )
    assert found.value == "specserve.engine.inside.repairs:register"


def test_plugin_is_light_and_silent_unasked():
    """Without our variable it imports nothing of vLLM, torch or our own config, and prints nothing."""
    code = (
        "import sys; from specserve.engine.inside import repairs; repairs.register();"
        "print(sorted(m for m in ('torch', 'vllm', 'pydantic', 'requests', 'yaml') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
