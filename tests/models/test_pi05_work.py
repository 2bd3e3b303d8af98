"""What π0.5 computes, counted from the program at the published size: nothing for what is absent or not read."""

import math

import jax
import jax.numpy as jnp
import pytest

from somaspeed_jax.flow import flow_loss, loss_value
from somaspeed_jax.models import pi05
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.layers.param import bind, param_specs
from somaspeed_jax.scaling.flops import Product, count_flops, largest_dimension, products
from somaspeed_jax.state import split_trainable

CONFIG = pi05.SIZES["published"]
POLICY = pi05.build(CONFIG)
SPECS = param_specs(POLICY)
PARAMS = {path: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for path, spec in SPECS.items()}
BATCH = 2


def observation(cameras: int, prompt: int) -> Observation:
    """Shapes alone."""

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((BATCH, *sizes), dtype)

    return Observation(
        images=tuple(shape(*CONFIG.vision.image, 3) for _ in range(cameras)),
        image_mask=shape(cameras, dtype=jnp.bool_),
        tokens=shape(prompt, dtype=jnp.int32),
        token_mask=shape(prompt, dtype=jnp.bool_),
        state=shape(CONFIG.action_dim),
        embodiment=shape(dtype=jnp.int32),
    )


def encode(params, seen):
    return bind(POLICY, params).encode(seen, None)


def encode_flops(cameras: int, prompt: int) -> int:
    """By hand: 2 m n k a product, every token of every camera and of the prompt, the last layer's K and V alone."""
    v, g = CONFIG.vision, CONFIG.trunk
    pictures = cameras * v.tokens
    p = pictures + prompt
    block = 4 * v.width**2 + 2 * v.width * v.mlp
    vision = pictures * (3 * v.patch**2 * v.width + v.depth * block + v.width * g.width)
    vision += v.depth * cameras * 2 * v.tokens**2 * v.width  # scores and weighted sums
    key_value = 2 * g.width * g.kv_heads * g.head_width
    inner = g.heads * g.head_width
    layer = p * (2 * g.width * inner + key_value + 3 * g.width * g.mlp) + 2 * p**2 * inner
    return 2 * BATCH * (vision + (g.depth - 1) * layer + p * key_value)


@pytest.mark.parametrize("cameras, prompt", [(3, 200), (2, 200), (2, 48), (0, 48)])
def test_encode_computes_what_is_there_and_no_more(cameras, prompt):
    assert count_flops(encode, PARAMS, observation(cameras, prompt)) == encode_flops(cameras, prompt)


def test_absent_camera_and_short_prompt_save_work():
    """LeRobot's prefix is three slots and 200 tokens; two cameras and a prompt of 48 cost 58 % of that."""
    assert encode_flops(2, 48) / encode_flops(3, 200) == pytest.approx(0.584, abs=0.001)


def flow_shapes(times: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """x or noise [b, K, t, a], and time [b, K]."""
    shape = (BATCH, times, CONFIG.horizon, CONFIG.action_dim)
    return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:2], jnp.float32)


def velocity_flops(times: int) -> int:
    def velocity(params, context, seen, x, time):
        policy = bind(POLICY, params)
        return policy.velocity(policy.condition(context, seen, None), x, time, None)

    seen = observation(2, 48)
    context = jax.eval_shape(encode, PARAMS, seen)
    return count_flops(velocity, PARAMS, context, seen, *flow_shapes(times))


def step_products(preset: str, times: int) -> list[Product]:
    """Of the loss and its gradient with respect to what a preset trains; two cameras and a prompt of 48."""
    names, others = split_trainable(SPECS, pi05.trainable_patterns(preset))

    def loss(trained, frozen, seen, noise, time):
        policy = bind(POLICY, {**frozen, **trained})
        actions = jnp.zeros((BATCH, CONFIG.horizon, CONFIG.action_dim))
        terms = flow_loss(policy, seen, actions, actions == 0, jnp.ones(BATCH), noise, time, None)
        return loss_value(policy.flow, terms)

    trained, frozen = ({path: PARAMS[path] for path in paths} for paths in (names, others))
    return products(jax.value_and_grad(loss), trained, frozen, observation(2, 48), *flow_shapes(times))


def total(found: list[Product]) -> int:
    return sum(product.total for product in found)


@pytest.fixture(scope="module")
def expert_step():
    return step_products("expert", times=1)


def test_frozen_parts_run_once_and_are_not_differentiated(expert_step):
    """One encode; and of the expert: forward, gradients of its weights, gradients of what it was given that leads to
    weights, which the prefix's keys and values do not."""
    forward = velocity_flops(1)
    assert 2.5 * forward < total(expert_step) - encode_flops(2, 48) < 3 * forward


def test_flow_times_share_one_encode(expert_step):
    encoding = encode_flops(2, 48)
    assert total(step_products("expert", times=3)) - encoding == 3 * (total(expert_step) - encoding)


def test_full_fine_tuning_has_no_product_as_wide_as_the_vocabulary():
    found = step_products("full", times=1)
    assert largest_dimension(found) == CONFIG.trunk.mlp < CONFIG.vocabulary
    assert total(found) < 3 * (encode_flops(2, 48) + velocity_flops(1))


def test_parameters_are_those_that_learn_in_full_fine_tuning():
    """LeRobot's 4,143,404,816 less two vocabulary heads, and less what no gradient reaches: of the last trunk layer
    its queries, output, second norm and MLP, and the norm after it."""
    trunk = CONFIG.trunk
    heads = CONFIG.vocabulary * (trunk.width + CONFIG.expert.width)
    unread = 2 * trunk.width * trunk.heads * trunk.head_width + 3 * trunk.width * trunk.mlp + 2 * trunk.width
    count = sum(math.prod(spec.shape) for spec in SPECS.values())
    assert count == 3_244_377_872 == 4_143_404_816 - heads - unread
