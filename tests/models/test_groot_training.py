"""GR00T in training: 8 flow times, absent cameras and padding, full fine-tuning, adapters, embodiments, dropout.

Numbers are recorded from LeRobot 0.6.1 by tools/make_reference_groot.py; gradients by their norm and by their product
with a fixed direction.
"""

import dataclasses
import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from groot_reference import CONFIG, FIXTURES, PATCHES, REFERENCE, observation, reference_params, relative_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from somaspeed_jax import flow
from somaspeed_jax.models import groot
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.layers.linear import LoraSpec
from somaspeed_jax.models.layers.param import Runtime, bind, initialise, param_specs
from somaspeed_jax.models.weights.groot import table
from somaspeed_jax.models.weights.table import place

ACTIVATION, GRADIENT, ZERO = 1e-5, 1e-4, 1e-7
UPSTREAM = dataclasses.replace(CONFIG, mask_vl_padding=False)
MORE = dict(np.load(FIXTURES / "groot_more.npz"))
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time, to the same numbers within rounding
# With these tensors the loss does not change: softmax does not see what is added to all keys.
NOTHING = ("to_k.bias",)


class WithPatches:
    """A bound policy whose `encode` takes the recorded patches, of which the two frames differ."""

    def __init__(self, policy: groot.Groot):
        self.policy, self.flow = policy, policy.flow
        self.condition, self.velocity = policy.condition, policy.velocity

    def encode(self, observation: Observation, keys) -> groot.Context:
        return self.policy.encode_patches(PATCHES, observation)


def recorded_batch() -> dict:
    """Patches, actions and mask of the recording in groot_reference."""
    return {
        "observation": observation(),
        "actions": jnp.asarray(REFERENCE["in/action"]),
        "mask": jnp.asarray(REFERENCE["in/action_mask"] > 0),
    }


def ragged_batch(pad: int = 0) -> dict:
    """Three samples of pictures: both cameras, the second alone, the first alone. pad: further tokens on the left."""
    seen = {key[10:]: value for key, value in MORE.items() if key.startswith("ragged/in/")}
    left = ((0, 0), (pad, 0))
    return {
        "observation": Observation(
            images=(jnp.asarray(seen["image0"]), jnp.asarray(seen["image1"])),
            image_mask=jnp.asarray(seen["present"]),
            tokens=jnp.asarray(np.pad(seen["input_ids"], left)),
            token_mask=jnp.asarray(np.pad(seen["attention_mask"], left) > 0),
            state=jnp.asarray(seen["state"]),
            embodiment=jnp.asarray(seen["embodiment_id"]),
        ),
        "actions": jnp.asarray(seen["action"]),
        "mask": jnp.asarray(seen["action_mask"] > 0),
    }


@functools.cache
def compiled(config: groot.GrootConfig, patches: bool):
    """(trained, other parameters, batch, noise, time, keys) -> (loss, velocity), gradients."""
    policy = groot.build(config, Runtime())

    def loss(trained, rest, batch, noise, time, keys):
        bound, seen = bind(policy, rest | trained), []
        velocity = bound.velocity
        bound.velocity = lambda *args: seen.append(velocity(*args)) or seen[0]
        weight = jnp.ones(len(batch["actions"]))
        used = WithPatches(bound) if patches else bound
        terms = flow.flow_loss(used, batch["observation"], batch["actions"], batch["mask"], weight, noise, time, keys)
        return flow.loss_value(policy.flow, terms), seen[0]

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def run(config, params, batch, noise, time, *, train="head.", keys=None, patches=False):
    """(loss, velocity), gradients of the parameters whose path begins with `train`."""
    trained = {path: value for path, value in params.items() if path.startswith(train)}
    rest = {path: value for path, value in params.items() if path not in trained}
    return compiled(config, patches)(trained, rest, batch, jnp.asarray(noise), jnp.asarray(time), keys)


@pytest.fixture(scope="module")
def params():
    return reference_params(UPSTREAM)


def probe(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The direction of tools/make_reference_groot.py."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def upstream_gradients(gradients, config) -> dict[str, np.ndarray]:
    """Our gradients under upstream's names and in its shapes; embodiments that are not held have none."""
    pieces, out = place(table(config), param_specs(groot.build(config, Runtime()))), {}
    for path, gradient in gradients.items():
        for piece in pieces[path]:
            tensor = out.setdefault(piece.name, np.zeros(piece.row.shape, np.float32))
            piece.write(np.asarray(gradient), tensor)
    return out


def check_gradients(case: str, gradients, config) -> None:
    ours = upstream_gradients(gradients, config)
    assert set(MORE[f"{case}/names"]) == ours.keys()
    wrong = {}
    for name, norm, dot in zip(MORE[f"{case}/names"], MORE[f"{case}/norm"], MORE[f"{case}/dot"], strict=True):
        gradient = ours[name].astype(np.float64)
        if name.endswith(NOTHING) and norm < ZERO:
            assert np.abs(gradient).max() <= ZERO, name
            continue
        # A product with a random direction of unit variance is as large as the norm.
        found = (
            abs(np.linalg.norm(gradient) - norm) / norm,
            abs(np.sum(gradient * probe(name, gradient.shape)) - dot) / norm,
        )
        if not max(found) <= GRADIENT:
            wrong[name] = found
    assert wrong == {}


def test_eight_flow_times(params):
    """One encode, one condition and K in the query axis give the mean of upstream's K losses and gradients."""
    noise, time = MORE["eight/in/noise"], MORE["eight/in/time"]
    (loss, velocity), gradients = run(UPSTREAM, params, recorded_batch(), noise, time, patches=True)
    assert relative_error(velocity, MORE["eight/velocity"]) <= ACTIVATION
    assert relative_error(loss, MORE["eight/loss"]) <= ACTIVATION
    check_gradients("eight", gradients, UPSTREAM)


def test_full_fine_tuning(params):
    noise, time = REFERENCE["in/noise"][:, None], REFERENCE["in/time"][:, None]
    (loss, _), gradients = run(UPSTREAM, params, recorded_batch(), noise, time, train="", patches=True)
    assert relative_error(loss, REFERENCE["out/loss"]) <= ACTIVATION
    check_gradients("full", gradients, UPSTREAM)


def test_absent_cameras_and_padding(params):
    """Pictures in, not patches. A row has the placeholders of its own cameras; embodiments 2, 0, 2."""
    noise, time = MORE["ragged/in/noise"], MORE["ragged/in/time"]
    (loss, velocity), gradients = run(UPSTREAM, params, ragged_batch(), noise, time)
    assert relative_error(velocity, MORE["ragged/velocity"]) <= ACTIVATION
    assert relative_error(loss, MORE["ragged/loss"]) <= ACTIVATION
    check_gradients("ragged", gradients, UPSTREAM)
    # Unmasked, as upstream in a batch, a sample is not what it is alone: what `mask_vl_padding` is for.
    assert relative_error(velocity[1], MORE["alone1/velocity"][0]) > 1e-3


@functools.cache
def evaluate(config):
    """(params, observation, x, time) -> velocity."""
    policy = groot.build(config, Runtime())

    def velocity(params, observation, x, time):
        bound = bind(policy, params)
        memory = bound.condition(bound.encode(observation, None), observation, None)
        return bound.velocity(memory, x, flow.network_time(policy.flow, time), None)

    return jax.jit(velocity, compiler_options=QUICK)


def noisy(batch) -> tuple[jax.Array, jax.Array]:
    time = jnp.asarray(MORE["ragged/in/time"])
    t = time[..., None, None]
    return t * batch["actions"][:, None] + (1 - t) * MORE["ragged/in/noise"], time


@pytest.mark.parametrize("pad", [0, 5])
def test_masked_padding_gives_each_sample_what_upstream_gives_it_alone(params, pad):
    batch = ragged_batch(pad)
    velocity = evaluate(CONFIG)(params, batch["observation"], *noisy(batch))
    for row in range(3):
        assert relative_error(velocity[row], MORE[f"alone{row}/velocity"][0]) <= ACTIVATION, row


def test_a_row_of_padding_alone_is_finite(params):
    batch = ragged_batch()
    seen = batch["observation"]
    seen = seen._replace(token_mask=seen.token_mask.at[1].set(False), image_mask=seen.image_mask.at[1].set(False))
    trained = {path: value for path, value in params.items() if path.startswith("head.")}
    rest = {path: value for path, value in params.items() if path not in trained}
    noise, time = jnp.asarray(MORE["ragged/in/noise"]), jnp.asarray(MORE["ragged/in/time"])
    batch = batch | {"observation": seen}
    (loss, velocity), gradients = compiled(UPSTREAM, False)(trained, rest, batch, noise, time, None)
    assert np.isfinite(loss) and np.isfinite(velocity).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_only_the_embodiments_in_the_data(params):
    """Two of four rows, in another order: the same numbers, and parameters for these two alone."""
    held = dataclasses.replace(UPSTREAM, embodiments=(2, 0))
    kept = reference_params(held)
    assert kept["head.action.w1.kernel"].shape[0] == 2
    np.testing.assert_array_equal(kept["head.action.w1.kernel"], params["head.action.w1.kernel"][jnp.array([2, 0])])
    batch = ragged_batch()
    seen = batch["observation"]
    batch["observation"] = seen._replace(embodiment=jnp.array([0, 1, 0]))
    (loss, _), gradients = run(held, kept, batch, MORE["ragged/in/noise"], MORE["ragged/in/time"])
    assert relative_error(loss, MORE["ragged/loss"]) <= ACTIVATION
    check_gradients("ragged", gradients, held)


def test_dropout_is_the_same_in_any_batch_and_on_any_mesh(params):
    """A sample's draws come from its key alone: not from its place, the batch, K, or the devices."""
    config = dataclasses.replace(CONFIG, dropout=0.3, vl_dropout=0.3, state_dropout=0.5, input_state_dropout=0.5)
    policy = groot.build(config, Runtime())
    batch = ragged_batch()["observation"]
    rows = jnp.array([0, 1, 2, 0, 1, 2, 0, 1])
    batch = jax.tree.map(lambda x: x[rows], batch)
    keys = jax.random.split(jax.random.key(0), 8)
    x = jax.random.normal(jax.random.key(1), (8, 2, 6, 10))
    time = jnp.full((8, 2), 300.0)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def velocity(params, batch, x, time, keys):
        bound = bind(policy, params)
        memory = bound.condition(bound.encode(batch, keys), batch, keys)
        return bound.velocity(memory, x, time, keys)

    whole = velocity(params, batch, x, time, keys)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("batch"))
    placed = jax.device_put((batch, x, time, keys), split)
    everywhere = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    on_mesh = velocity.lower(everywhere, *placed).compile()
    np.testing.assert_allclose(on_mesh(everywhere, *placed), whole, atol=2e-5)
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", on_mesh.as_text())
    part = jax.tree.map(lambda a: a[4:6], (batch, x[:, :1], time[:, :1], keys))
    np.testing.assert_allclose(velocity(params, *part), whole[4:6, :1], atol=2e-5)
    others = velocity(params, batch, x, time, keys[::-1])
    assert float(jnp.abs(others - whole).max()) > 0.1


def test_dropout_keeps_the_mean():
    x = jnp.ones((4, 3, 50, 40))
    keys = jax.random.split(jax.random.key(0), 12).reshape(4, 3)
    out = groot.dropout(x, 0.2, keys, 1)
    assert set(np.unique(np.round(out, 4))) == {0.0, 1.25}
    assert abs(float(out.mean()) - 1) < 0.02
    assert not np.array_equal(out, groot.dropout(x, 0.2, keys, 2))
    assert groot.dropout(x, 0.2, None, 1) is x
    # One dropout in place of two in a row: kept with 0.8², scaled by its inverse.
    assert groot._twice(0.2) == pytest.approx(1 - 0.64)


def test_adapters(params):
    """New adapters change nothing, gradients reach them; they and the head are what `lora` trains."""
    config = dataclasses.replace(CONFIG, lora=LoraSpec(rank=2, alpha=4.0))
    policy = groot.build(config, Runtime())
    new = {path: value for path, value in initialise(policy, 0).items() if ".lora." in path}
    assert len(new) == 2 * 2 * 4  # two stacks of text layers, four kernels, A and B
    patterns = groot.trainable_patterns("lora")
    trained = {path for path in param_specs(policy) if any(re.fullmatch(pattern, path) for pattern in patterns)}
    assert trained == new.keys() | {path for path in params if path.startswith("head.")}
    noise, time = MORE["ragged/in/noise"], MORE["ragged/in/time"]
    (_, velocity), gradients = run(config, params | new, ragged_batch(), noise, time, train="language.tapped.qkv.lora")
    assert relative_error(velocity[0], MORE["alone0/velocity"][0]) <= ACTIVATION
    assert float(np.abs(gradients["language.tapped.qkv.lora.b"]).max()) > 0  # B starts at zero, so A learns later


def test_presets_and_decay():
    specs = param_specs(groot.build(CONFIG, Runtime()))
    patterns = groot.trainable_patterns("expert")
    trained = [path for path in specs if any(re.fullmatch(pattern, path) for pattern in patterns)]
    assert all(path.startswith("head.") for path in trained) and "head.vlln.scale" in trained
    spared = {path.rsplit(".", 1)[1] for path in trained if groot.no_decay(path)}
    decayed = {path.rsplit(".", 1)[1] for path in trained if not groot.no_decay(path)}
    assert (spared, decayed) == ({"bias", "scale"}, {"kernel", "offset", "table"})
    with pytest.raises(ValueError, match=r"'everything' of groot: expected one of expert, full, lora"):
        groot.trainable_patterns("everything")


def test_bfloat16_stays_near(params):
    """The compute type of the recipes, against float32."""
    batch = ragged_batch()
    policy = groot.build(CONFIG, Runtime(jnp.bfloat16))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def velocity(params, observation, x, time):
        bound = bind(policy, params)
        memory = bound.condition(bound.encode(observation, None), observation, None)
        return bound.velocity(memory, x, flow.network_time(policy.flow, time), None)

    low = velocity(params, batch["observation"], *noisy(batch))
    assert low.dtype == jnp.float32
    assert relative_error(low, evaluate(CONFIG)(params, batch["observation"], *noisy(batch))) < 0.03


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dit_layers": 6}, r"dit_layers is 6: .* multiple of 4"),
        ({"embodiments": (1, 1)}, r"embodiments is \(1, 1\)"),
        ({"embodiments": (4,)}, r"of 0 to 3"),
        ({"horizon": 17}, r"horizon is 17: .* positions, 16"),
        ({"text_layers": 1}, r"text_layers is 1: .* a tap, 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_pictures_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="20x16 pixels: both sides must be multiples of 8"):
        CONFIG.vision.grid(20, 16)
