"""What every declared object shares: the base model and the types of names and shares."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Spec(BaseModel):
    """Base of every declared object: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
