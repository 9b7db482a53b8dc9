"""An Orbax checkpoint is a model source like any other."""

import numpy as np
import pytest

from paxserve.device.checkpoint import save
from paxserve.models.load import load_model


def test_a_saved_model_loads_by_its_path(tmp_path):
    tiny = load_model("tiny", seed=3)
    save(tmp_path / "saved", tiny.config, tiny.parameters)
    loaded = load_model(str(tmp_path / "saved"))
    assert loaded.config == tiny.config
    assert loaded.parameters.keys() == tiny.parameters.keys()
    for name, array in tiny.parameters.items():
        assert isinstance(loaded.parameters[name], np.ndarray)
        np.testing.assert_array_equal(loaded.parameters[name], array)


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    tiny = load_model("tiny")
    save(tmp_path / "saved", tiny.config, tiny.parameters)
    (tmp_path / "saved" / "checkpoint.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint\.json"):
        load_model(str(tmp_path / "saved"))
