"""Rotary phases: each scaling against a formula written for one frequency at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.rotary import rotate
from paxserve.device.layers import gather_rotation, inverse_frequencies, rotation_table
from paxserve.models.config import RopeConfig

LLAMA3 = {"theta": 500_000.0, "type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def plain(theta, head_dim):
    return [1.0 / math.pow(theta, 2 * i / head_dim) for i in range(head_dim // 2)]


def banded(rope, head_dim):
    """As Llama 3.1's own code decides it, branch by branch."""
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    scaled = []
    for frequency in plain(rope.theta, head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < longest_kept:
            scaled.append(frequency)
        elif wavelength > shortest_scaled:
            scaled.append(frequency / rope.factor)
        else:
            smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            scaled.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return scaled


@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (1e5, 64), (1e6, 128), (50.0, 2)])
def test_default_frequencies(theta, head_dim):
    found = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, plain(theta, head_dim), rtol=1e-13)


def test_linear_frequencies():
    rope = RopeConfig(theta=10_000.0, type="linear", factor=4.0)
    found = inverse_frequencies(rope, 32)
    np.testing.assert_allclose(found, np.array(plain(10_000.0, 32)) / 4, rtol=1e-13)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("original", [16, 8192])
def test_llama3_frequencies(factor, original):
    rope = RopeConfig(**LLAMA3, factor=factor, original_max_position=original)
    expected = banded(rope, 128)
    np.testing.assert_allclose(inverse_frequencies(rope, 128), expected, rtol=1e-13)
    ratio = np.array(expected) / plain(rope.theta, 128)
    assert ratio.min() == pytest.approx(1 / factor)
    # All three bands are met (with 16 positions, no wavelength is short enough to be kept).
    assert (1 / factor + 1e-6 < ratio).any()
    assert ratio.max() == pytest.approx(1.0) or original == 16


def test_unknown_scaling_is_an_error():
    with pytest.raises(ValueError, match="unknown rope type 'yarn'"):
        inverse_frequencies(RopeConfig(type="yarn"), 8)


def test_far_positions_keep_their_accuracy():
    position, head_dim = 100_000, 64
    rope = RopeConfig(theta=10_000.0)
    cos, sin = rotation_table(rope, head_dim=head_dim, num_positions=position + 1)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (position + 1, head_dim // 2)
    phase = [position * frequency for frequency in plain(rope.theta, head_dim)]
    np.testing.assert_allclose(cos[position], [math.cos(p) for p in phase], atol=1e-7, rtol=0)
    np.testing.assert_allclose(sin[position], [math.sin(p) for p in phase], atol=1e-7, rtol=0)
    narrow = np.float32(position) * np.array(plain(rope.theta, head_dim), np.float32)
    assert np.abs(np.cos(narrow) - cos[position]).max() > 1e-3  # what float32 phases would lose
    np.testing.assert_array_equal(cos[0], 1.0)
    np.testing.assert_array_equal(sin[0], 0.0)


def test_a_rotated_pair_turns_by_its_phase():
    """Pairs are (i, i + H/2): at position 3 with frequencies 1 and 0.5."""
    x = jnp.asarray([[[1.0, 0.0, 0.0, 2.0]], [[1.0, 0.0, 0.0, 2.0]]])
    cos, sin = (
        np.array([[f(p * w) for w in (1.0, 0.5)] for p in range(4)], np.float32)
        for f in (math.cos, math.sin)
    )
    rotation = gather_rotation((jnp.asarray(cos), jnp.asarray(sin)), jnp.asarray([0, 3]))
    found = np.asarray(rotate(x, *rotation))
    np.testing.assert_array_equal(found[0], x[0])
    expected = [math.cos(3), -2 * math.sin(1.5), math.sin(3), 2 * math.cos(1.5)]
    np.testing.assert_allclose(found[1, 0], expected, atol=1e-6)
