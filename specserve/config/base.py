"""The base of every section: frozen, closed, every key described."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A section of the config file. Unknown keys are an error, values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
