"""Checkpoints on disk: what they restore, and what a damaged one leads to."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import open_draws
from numpyro_sgmcmc.checkpoint.store import CheckpointStore, decode, encode
from numpyro_sgmcmc.data.subsampling import StreamState
from numpyro_sgmcmc.errors import CheckpointError, CheckpointWarning, ModelWarning, ModelWarningKind
from numpyro_sgmcmc.sampling.mass_matrix import MassMatrixBlocks
from tests.checkpoint.runs import (
    assert_bitwise_equal,
    manifest_of,
    newest,
    resume,
    slow,
    truncate,
)


def test_encode_and_decode_keep_types_and_bits():
    tree = {
        "a": (1, 2.5, float("inf"), None, True, "x"),
        "b": [jnp.arange(3), np.float32(0.1), np.arange(2.0), jnp.zeros((0, 2))],
        "typed": jax.random.key(3, impl="rbg"),
        "raw": jax.random.PRNGKey(3),
        "stream": StreamState(*range(len(StreamState._fields))),
        "blocks": MassMatrixBlocks((("x", 1), ("y", 2)), ((("y", "x"), True),)),
        "matrices": {("x", "y"): jnp.eye(2), ("z",): jnp.ones(3)},
        "warnings": (ModelWarning(("x",), ModelWarningKind.MULTIMODAL, "two modes"),),
    }
    arrays = []
    decoded = decode(json.loads(json.dumps(encode(tree, arrays))), arrays)
    assert jax.tree.structure(decoded) == jax.tree.structure(tree)
    for name in ("a", "blocks", "warnings"):
        assert decoded[name] == tree[name]
    assert decoded["typed"].dtype == tree["typed"].dtype
    for a, b in zip(jax.tree.leaves(decoded["b"]), jax.tree.leaves(tree["b"]), strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_encode_of_another_type_raises():
    with pytest.raises(TypeError, match="set"):
        encode({"a": {1}}, [])


def test_decode_of_another_class_raises():
    with pytest.raises(ValueError, match="subprocess:Popen"):
        decode({"class": "subprocess:Popen", "fields": {}}, [])


def damage_manifest(folder):
    truncate(manifest_of(newest(folder)))


def damage_state(folder):
    for path in (newest(folder) / "state").rglob("*"):
        if path.is_file():
            truncate(path)


def damage_values(folder):
    path = manifest_of(newest(folder))
    manifest = json.loads(path.read_text())
    manifest["arrays"][3][2] += 1
    path.write_text(json.dumps(manifest))


def damage_draws(folder):
    truncate(folder / "draws.zarr/posterior/beta/c/1/2/0")


def remove_draws(folder):
    shutil.rmtree(folder / "draws.zarr/posterior/rate/c/1/2", ignore_errors=True)
    (folder / "draws.zarr/posterior/rate/c/1/2").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage_manifest, marks=slow),
        damage_state,
        pytest.param(damage_values, marks=slow),
        damage_draws,
        pytest.param(remove_draws, marks=slow),
    ],
)
def test_damaged_checkpoint_resumes_from_the_one_before(whole, copy, damage):
    damage(copy)
    with pytest.warns(CheckpointWarning, match="iteration 19 is damaged.* 15"):
        mcmc = resume(copy)
    assert_bitwise_equal(mcmc, whole[1])
    assert len(list((copy / "checkpoints").iterdir())) == 2
    assert_bitwise_equal(resume(copy), whole[1])


def test_damaged_checkpoints_without_a_whole_one_raise(copy):
    for step in (copy / "checkpoints").iterdir():
        truncate(manifest_of(step))
    with pytest.raises(CheckpointError, match=r"No checkpoint.* iteration 19"):
        resume(copy)


def test_half_written_checkpoint_does_not_count(whole, copy):
    """Orbax writes into a folder with a suffix, and removes it when it writes the next."""
    half_written = newest(copy).rename(newest(copy).with_suffix(".orbax-checkpoint-tmp-1"))
    assert_bitwise_equal(resume(copy), whole[1])
    assert not half_written.exists()


@pytest.mark.parametrize(("change", "age"), [(-1, "older"), (1, "newer")])
def test_run_in_another_format_raises_and_its_draws_are_readable(copy, change, age):
    for path in copy.glob("checkpoints/*/manifest/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["format"] += change
        path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"{age} format"):
        resume(copy)
    assert open_draws(copy)["posterior"].sizes["draw"] == 6


def test_run_of_formats_before_orbax_wrote_the_manifest_is_recognised(copy):
    for path in copy.glob("checkpoints/*/manifest/manifest.json"):
        manifest = json.loads(path.read_text()) | {"format": 6}
        path.parents[1].joinpath("checkpoint.json").write_text(json.dumps(manifest))
        shutil.rmtree(path.parent)
    assert CheckpointStore(copy).has_checkpoint
    with pytest.raises(ValueError, match="older format"):
        resume(copy)
    assert open_draws(copy)["posterior"].sizes["draw"] == 6
