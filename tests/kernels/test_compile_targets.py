"""Which target stands for a group of devices; no compiler is asked."""

import pytest

from kernels_pallas.compile_targets import TARGETS, group_target


@pytest.mark.parametrize(("name", "num_devices", "target"), [
    ("h100", 1, "h100"), ("h100", 2, "h100-8"), ("h100", 8, "h100-8"),
    ("v5e", 1, "v5e"), ("v5e", 4, "v5e"), ("v5e", 8, "v5e-8"), ("v6e", 5, "v6e-8"),
])  # fmt: skip
def test_the_smallest_group_that_has_so_many(name, num_devices, target):
    assert group_target(name, num_devices) == target
    assert TARGETS[target].device_kind == TARGETS[name].device_kind


def test_a_group_beyond_all_targets():
    with pytest.raises(ValueError, match="a group of 16 NVIDIA H100 80GB HBM3 cannot be compiled"):
        group_target("h100", 16)
