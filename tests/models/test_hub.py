"""What the user calls a model becomes a folder, or a clear refusal. No test reaches the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from deltaserve.models.hub import FILES, resolve
from tests.models.factory import BUILTIN, tiny_config, write_checkpoint


def test_none_is_the_builtin_model() -> None:
    assert resolve(None) == BUILTIN


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve("~/models") == tmp_path / "models"


def test_a_folder_named_like_an_id_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")


@pytest.mark.parametrize(
    "model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere", "", "-x/y", "a b/c"]
)
def test_what_is_no_folder_and_no_id_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"does not exist, and does not look like a hub id \(owner/name\)"):
        resolve(model)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; give the folder of a checkpoint"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("builtin", [True, False])
def test_a_folder_has_no_revision(tmp_path: Path, builtin: bool) -> None:
    with pytest.raises(ValueError, match="revision is 'main', but the model is a folder"):
        resolve(None if builtin else str(tmp_path), "main")


def test_offline_and_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="owner/name is no folder here, not complete in the local cache, and the hub"):
        resolve("owner/name")


def respond(error: type[errors.HfHubHTTPError]) -> Callable[..., str]:
    def download(*_: Any, **__: Any) -> str:
        # What the constructor wants differs between versions of the hub's library.
        raise error.__new__(error, "told by the hub")

    return download


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError, "owner/name at revision v1 is no folder here and not on the hub, or private"),
        (errors.GatedRepoError, "owner/name at revision v1 is gated; accept its terms"),
        (errors.RevisionNotFoundError, "owner/name has no revision v1; give a branch, tag or commit"),
        (errors.HfHubHTTPError, "the hub cannot be reached .HfHubHTTPError."),
    ],
)
def test_what_the_hub_refuses(
    error: type[errors.HfHubHTTPError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", respond(error))
    with pytest.raises(ValueError, match=message):
        resolve("owner/name", "v1")


def test_the_config_is_judged_before_the_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None, list[str]]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((model, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    write_checkpoint(tmp_path)
    assert resolve("owner/name", "v1") == tmp_path
    assert calls == [("owner/name", "v1", ["config.json"]), ("owner/name", "v1", list(FILES))]

    calls.clear()
    write_checkpoint(tmp_path, tiny_config(model_type="llama"))
    with pytest.raises(ValueError, match="model_type"):
        resolve("owner/name")
    assert calls == [("owner/name", None, ["config.json"])]
