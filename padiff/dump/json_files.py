"""Reading the JSON files of a run folder, with clear errors for damaged files."""

from __future__ import annotations

from typing import Any

from padiff.dump.medium import check_inside, read_text
from padiff.dump.remote_path import AnyPath
from padiff.dump.untrusted import parse_json
from padiff.errors import RunFolderError

# Errors that decoding damaged JSON may raise.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError)


def read_json(path: AnyPath, root: AnyPath, version: int, missing: str) -> Any:
    """Return the content of a JSON file, which must be an object of this schema version.

    Args:
        root: the folder that the file has to lie in.
        version: the expected schema version.
        missing: end of the error message if the file is missing.

    Raises:
        RunFolderError: the file is missing, damaged, of another version, or outside of the folder.
    """
    inside = check_inside(path, root)
    try:
        content = parse_json(read_text(inside))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {missing}") from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error})") from error
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged, it is no JSON ({error}). Copy the run again") from error
    file_version = content.get("schema_version") if isinstance(content, dict) else None
    if file_version != version:
        raise RunFolderError(
            f"{path} has schema version {file_version!r}; this padiff reads {version}. "
            "Use the padiff that recorded it, or record the run again"
        )
    return content


class Explained:
    """Context manager that turns errors of decoding a damaged file into a `RunFolderError` that names the file."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, _DAMAGE):
            raise RunFolderError(
                f"{self._path} is damaged: {type(error).__name__}: {error}. It was edited, or only half copied"
            ) from error
