"""Names to directories; the network is replaced by a spy."""

import fnmatch

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from paxserve.models import hub
from paxserve.models.hub import FETCHED, model_directory


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Calls to the download, which always 'succeeds'."""
    calls = []

    def spy(repo_id, **options):
        calls.append((repo_id, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", spy)
    return calls


def test_an_id_is_fetched_with_the_allowed_patterns(fetched, tmp_path):
    assert model_directory("org/name", revision="abc") == tmp_path / "snapshot"
    options = {"revision": "abc", "cache_dir": None, "allow_patterns": list(FETCHED)}
    assert fetched == [("org/name", options)]


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("config.json", True),
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.json", True),
        ("chat_template.jinja", True),
        ("modeling_llama.py", False),
        ("pytorch_model.bin", False),
        ("model.pt", False),
        ("model.pth", False),
        ("consolidated.safetensors", False),
        ("model.gguf", False),
        ("training_args.bin", False),
    ],
)
def test_neither_code_nor_pickles_match_the_patterns(file, wanted):
    assert any(fnmatch.fnmatch(file, pattern) for pattern in FETCHED) is wanted


def test_an_explicit_path_is_never_fetched(fetched, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("./org/name", str(tmp_path / "org" / "name")):
        assert model_directory(path).samefile(tmp_path / "org" / "name")
    assert model_directory(".").samefile(tmp_path)
    assert fetched == []


def test_a_local_directory_does_not_shadow_an_id(fetched, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_directory("org/name") == tmp_path / "snapshot"


def test_a_missing_path_is_not_tried_as_an_id(fetched):
    with pytest.raises(FileNotFoundError, match=r"\./nothing|nothing does not exist"):
        model_directory("./nothing")
    assert fetched == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "org/",
        "a/b/c",
        "org/../name",
        "org/na--me",
        "org/name.git",
        "org/na me",
        "https://huggingface.co/org/name",
        "org\\name",
        "org/na\0me",
        "org/" + "x" * 100,
        "bare",
    ],
)
def test_malformed_ids_are_refused_before_any_download(fetched, name):
    with pytest.raises(ValueError, match="model id"):
        model_directory(name)
    assert fetched == []


def test_a_bare_name_of_an_existing_directory_gets_a_hint(fetched, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"write \./mine"):
        model_directory("mine")


def test_offline_and_not_cached_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"'org/name'.*HF_HUB_OFFLINE.*as a path"):
        model_directory("org/name", cache_dir=tmp_path)


def test_offline_but_cached_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0" * 40
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    assert model_directory("org/name", cache_dir=tmp_path) == snapshot


def test_errors_of_the_hub_are_explained(monkeypatch):
    class Refused(RepositoryNotFoundError):
        def __init__(self):
            OSError.__init__(self, "404")

        def __str__(self):
            return "404"

    def refuse(repo_id, **_):
        raise Refused

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"does not hand out model 'org/name'.*gated"):
        model_directory("org/name")

    def absent(repo_id, **_):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", absent)
    with pytest.raises(FileNotFoundError, match="not in the local cache"):
        model_directory("org/name")
