"""The small TOML files a person keeps beside a queue: read, with every mistake at once.

What a file may hold is a frozen dataclass whose `__pydantic_config__` is `FORM`: unknown keys are
mistakes, and nothing is converted. Its `__post_init__` raises ValueError for what no type can say.
"""

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rebase.errors import UsageError
from rebase.words import visible

if TYPE_CHECKING:
    from pydantic import ConfigDict

T = TypeVar("T")
FORM: "ConfigDict" = {"extra": "forbid", "strict": True}


def read(path: Path, form: type[T]) -> T:
    """The file at `path` as a `form`; a file that is not there is an empty one.

    Raises UsageError whose `what` lists all mistakes, one a line.
    """
    from pydantic import TypeAdapter, ValidationError  # only who reads such a file pays for it

    here = visible("/".join(path.parts[-3:]))
    mistakes: list[str] = []
    try:
        content = path.read_bytes().decode("utf-8") if path.exists() else ""
        # as JSON, for there strictness still makes dataclasses of tables
        return TypeAdapter(form).validate_json(json.dumps(tomllib.loads(content), default=str))
    except OSError as error:
        mistakes.append(f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        mistakes.append("is not UTF-8, which TOML is written in")
    except tomllib.TOMLDecodeError as error:
        mistakes.append(str(error))  # it ends with line and column
    except ValidationError as error:
        for each in error.errors(include_url=False):
            key = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in each["loc"])[1:]
            said = each["msg"].removeprefix("Value error, ")
            if each["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                said = "no such key"
            mistakes.append(f"{key}: {said}" if key else said)
    raise UsageError(
        "\n".join(f"{here}: {visible(mistake)}" for mistake in mistakes),
        todo=f"Correct {here}, then run this again.",
    )
