"""What every policy is: three methods over an observation, a flow specification and named parameter groups."""

from typing import Any, NamedTuple, Protocol

import jax

from somaspeed_jax.flow_spec import FlowSpec


class Observation(NamedTuple):
    """What a policy sees, normalised and on the device.

    images: c arrays [b, h, w, 3] float in the model's pixel range, in the model's camera order. Cameras that the
      dataset does not have are not in the tuple and cost nothing.
    image_mask: [b, c] bool; false where that row has no such picture.
    tokens: [b, p] int32; token_mask: [b, p] bool.
    state: [b, s] float32, normalised and padded.
    embodiment: [b] int32.
    """

    images: tuple[jax.Array, ...]
    image_mask: jax.Array
    tokens: jax.Array
    token_mask: jax.Array
    state: jax.Array
    embodiment: jax.Array


class Policy(Protocol):
    """The interface that training, sampling, evaluation and serving rest on.

    `keys` is a [b] array of PRNG keys (dropout), or None for evaluation.
    """

    flow: FlowSpec
    action_dim: int  # a, padded
    horizon: int  # t

    def encode(self, observation: Observation, keys: jax.Array | None) -> Any:
        """The vision-language model: time-free, once per observation."""
        ...

    def condition(self, context: Any, observation: Observation, keys: jax.Array | None) -> Any:
        """What the action expert reads of the context: time-free, once per observation."""
        ...

    def velocity(self, memory: Any, x: jax.Array, time: jax.Array, keys: jax.Array | None) -> jax.Array:
        """x [b, K, t, a] float32 at flow times `time` [b, K] -> velocity [b, K, t, a] float32."""
        ...
