"""From what the user calls a model to a folder on disk: the built-in one, a folder, or a hub id.

Knows no tensor. A hub id's config.json is fetched and judged first, so that an unsupported model costs no download.
"""

from __future__ import annotations

import re
from pathlib import Path

from deltaserve.model_config import ModelConfig, load_config_json

BUILTIN = Path(__file__).resolve().parents[1] / "builtin"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILES = ("*.json", "*.jinja", "*.txt")
"""Config, index, tokenizer and template."""
FILES = (*SMALL_FILES, "*.safetensors")


def resolve(model: str | None, revision: str | None = None, with_weights: bool = True) -> Path:
    """The folder of a checkpoint: `model` is None (the built-in one), a folder, or a hub id `owner/name`, of which only
    the small files are fetched where the weights are not wanted.

    Raises ValueError for what is none of these, for a hub id that is unknown, private or unreachable, and for a hub
    id whose config.json is not supported.
    """
    is_folder = model is None or (model != "" and Path(model).expanduser().is_dir())
    if is_folder and revision is not None:
        raise ValueError(f"revision is {revision!r}, but the model is a folder; only a hub id has revisions")
    if model is None:
        return BUILTIN
    path = Path(model).expanduser()
    if is_folder:
        return path
    if model and path.exists():
        raise ValueError(f"model {model} is a file; give the folder of a checkpoint")
    if not HUB_ID.fullmatch(model):
        raise ValueError(
            f"model {model!r} does not exist, and does not look like a hub id (owner/name); give the folder of a "
            "checkpoint, a hub id, or nothing for the built-in model"
        )
    ModelConfig.from_hf(load_config_json(_download(model, revision, ("config.json",))))
    return _download(model, revision, FILES if with_weights else SMALL_FILES)


def _download(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import errors, snapshot_download

    at = f"{model} at revision {revision}" if revision is not None else model
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except errors.GatedRepoError as error:
        raise ValueError(f"model {at} is gated; accept its terms on the hub and log in with `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model {at} is no folder here and not on the hub, or private; check the name, or `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"model {model} has no revision {revision}; give a branch, tag or commit of it") from error
    except OSError as error:
        raise ValueError(
            f"model {at} is no folder here, not complete in the local cache, and the hub cannot be reached "
            f"({type(error).__name__}); give a folder, or connect and try again"
        ) from error
