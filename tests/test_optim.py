"""Schedules, groups, clipping, AdamW and the parameter average, against formulas written out in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from somaspeed_jax.optim import SCHEDULES, Group, adamw, assign_groups, average, global_norms, schedule

PEAK, FLOOR, W, D = 2.5e-5, 2.5e-6, 1000, 30_000


def cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def between(progress: float) -> float:
    return FLOOR + (PEAK - FLOOR) * cosine(progress)


# kind, total steps, {update s: learning rate}. The numbers for warm-up and decay are LeRobot's for π0.5.
CURVES = [
    (
        "lerobot", 100_000,  # cosine over the absolute step: it is below the peak when warm-up ends
        {0: PEAK / (W + 1), W - 1: PEAK * W / (W + 1), W: between(W / D), 15_000: between(0.5), D: FLOOR, D + 1: FLOOR},
    ),
    (
        "lerobot", 3000,  # a run shorter than the decay: both shrink to it
        {0: PEAK / 101, 99: PEAK * 100 / 101, 100: between(100 / 3000), 1500: between(0.5), 3000: FLOOR, 3001: FLOOR},
    ),
    (
        "lerobot", 20,  # so short that no warm-up is left
        {0: PEAK, 10: between(0.5), 20: FLOOR, 21: FLOOR},
    ),
    (
        "openpi", 100_000,  # cosine from the end of warm-up
        {0: PEAK / (W + 1), W - 1: PEAK * W / (W + 1), W: PEAK, 15_500: between(0.5), D: FLOOR, D + 1: FLOOR},
    ),
    (
        "groot", 20_000,  # from zero; cosine to the last step
        {0: 0.0, W - 1: PEAK * (W - 1) / W, W: PEAK, 10_500: between(0.5), 20_000: FLOOR, 20_001: FLOOR},
    ),
    (
        "molmoact2", 100_000,  # one update ahead
        {0: PEAK / W, W - 2: PEAK * (W - 1) / W, W - 1: PEAK, W: between(1 / (D - W)), D - 1: FLOOR, D + 1: FLOOR},
    ),
    (
        "constant", 100_000,
        {0: PEAK / (W + 1), W - 1: PEAK * W / (W + 1), W: PEAK, D: PEAK, D + 1: PEAK},
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind, steps, curve", CURVES, ids=[f"{kind}-{steps}" for kind, steps, _ in CURVES])
def test_learning_rate(kind, steps, curve):
    rate = schedule(kind, peak=PEAK, floor=FLOOR, warmup=W, decay=D, steps=steps)
    for step, expected in curve.items():
        assert float(rate(step)) == pytest.approx(expected, rel=2e-6, abs=1e-12), (kind, step)
    assert float(jax.jit(rate)(jnp.int32(W))) == pytest.approx(float(rate(W)), rel=1e-6)


def test_every_schedule_has_a_curve_and_others_are_refused():
    assert {kind for kind, _, _ in CURVES} == set(SCHEDULES)
    with pytest.raises(ValueError, match=r"'linear'.*lerobot"):
        schedule("linear", peak=1, floor=0, warmup=1, decay=2, steps=3)(0)


def test_openpi_schedule_is_optaxs():
    """openpi builds it from optax's own."""
    theirs = optax.warmup_cosine_decay_schedule(PEAK / (W + 1), PEAK, W, D, FLOOR)
    ours = schedule("openpi", peak=PEAK, floor=FLOOR, warmup=W, decay=D, steps=100_000)
    for step in (0, 1, W - 1, W, W + 1, 12_345, D - 1, D, D + 1000):
        assert float(ours(step)) == pytest.approx(float(theirs(step)), rel=1e-5)


def torch_adamw(params, gradients, *, lr, betas, eps, decay, clip):
    """torch.optim.AdamW after clip_grad_norm_, as their documentation states them, in float64.

    params: name -> array; gradients: a list of such dictionaries; lr, decay: name -> float; clip: name -> clip group.
    """
    params = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(x) for k, x in params.items()}
    for step, grads in enumerate(gradients, 1):
        norms = {
            name: math.sqrt(sum(float(np.sum(np.square(grads[k], dtype=np.float64))) for k in grads if clip[k] == name))
            for name in set(clip.values())
        }
        for k in params:
            g = np.asarray(grads[k], np.float64) * min(1.0, 1.0 / (norms[clip[k]] + 1e-6))
            params[k] = params[k] * (1 - lr[k] * decay[k])
            m[k] = betas[0] * m[k] + (1 - betas[0]) * g
            v[k] = betas[1] * v[k] + (1 - betas[1]) * g * g
            corrected = math.sqrt(1 - betas[1] ** step)
            params[k] = params[k] - lr[k] / (1 - betas[0] ** step) * m[k] / (np.sqrt(v[k]) / corrected + eps)
    return params


SHAPES = {"head.kernel": (7, 5), "head.bias": (5,), "tower.kernel": (4, 6), "tower.scale": ()}
GROUPS = [
    Group("bias", (r".*\.bias", r".*\.scale"), lr_scale=1.0, weight_decay=0.0),
    Group("tower", (r"tower\..*",), lr_scale=0.1, weight_decay=0.01, clip_group="tower"),
    Group("rest", (r".*",), lr_scale=1.0, weight_decay=0.1),
]


def run(params, gradients, groups, rate, **kw):
    optimizer = adamw(rate, groups, betas=(0.9, 0.95), eps=1e-8, **{"clip_norm": 1.0, **kw})
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    for grads in gradients:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture(scope="module")
def draws():
    """Parameters and five gradients: the first has tiny ones, the others are clipped."""
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
    sizes = (1e-7, 1.0, 30.0, 0.1, 5.0)
    return params, [
        {k: jnp.asarray(size * rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()} for size in sizes
    ]


def test_adamw_with_groups_is_torchs(draws):
    params, gradients = draws
    assigned = assign_groups(GROUPS, list(params))
    assert {path: group.name for path, group in assigned.items()} == {
        "head.kernel": "rest", "head.bias": "bias", "tower.kernel": "tower", "tower.scale": "bias",
    }  # fmt: skip
    found, _ = run(params, gradients, assigned, lambda step: 1e-2)
    expected = torch_adamw(
        params,
        gradients,
        lr={k: 1e-2 * g.lr_scale for k, g in assigned.items()},
        betas=(0.9, 0.95),
        eps=1e-8,
        decay={k: g.weight_decay for k, g in assigned.items()},
        clip={k: g.clip_group for k, g in assigned.items()},
    )
    for path in params:
        # Of how far it moved, not of where it is.
        moved, reference = np.asarray(found[path]) - params[path], expected[path] - np.asarray(params[path], np.float64)
        assert np.abs(moved - reference).max() <= 1e-5 * max(np.abs(reference).max(), np.abs(params[path]).max())
        assert np.abs(moved).max() > 1e-4


@pytest.mark.parametrize(
    "changed", [dict(clip_norm=0.0), dict(clip_norm=2.0)], ids=["not clipped", "clipped at 2"]
)  # fmt: skip
def test_clipping_matters(draws, changed):
    params, gradients = draws
    assigned = assign_groups(GROUPS, list(params))
    clipped, _ = run(params, gradients, assigned, lambda step: 1e-2)
    other, _ = run(params, gradients, assigned, lambda step: 1e-2, **changed)
    assert np.abs(clipped["head.kernel"] - other["head.kernel"]).max() > 1e-5


def test_clip_groups_do_not_see_each_other(draws):
    """A large gradient in one clip group leaves the other group's update as it is."""
    params, gradients = draws
    assigned = assign_groups(GROUPS, list(params))
    louder = [{**g, "tower.kernel": 1000 * g["tower.kernel"]} for g in gradients]
    quiet, loud = (run(params, g, assigned, lambda step: 1e-2)[0] for g in (gradients, louder))
    assert np.array_equal(quiet["head.kernel"], loud["head.kernel"])
    shared = assign_groups([Group("all", (".*",))], list(params))
    quiet, loud = (run(params, g, shared, lambda step: 1e-2)[0] for g in (gradients, louder))
    assert not np.array_equal(quiet["head.kernel"], loud["head.kernel"])


def test_norms_by_clip_group():
    grads = {"head.kernel": jnp.full((2, 2), 3.0), "head.bias": jnp.asarray([8.0]), "tower.kernel": jnp.asarray([5.0])}
    norms = global_norms(grads, assign_groups(GROUPS, list(grads)))
    assert {name: float(value) for name, value in norms.items()} == {"all": 10.0, "tower": 5.0}
    low = {path: grad.astype(jnp.bfloat16) for path, grad in grads.items()}
    assert all(norm.dtype == jnp.float32 for norm in global_norms(low, assign_groups(GROUPS, list(low))).values())


def test_parameter_without_a_group_is_refused():
    with pytest.raises(ValueError, match=r"head\.kernel belongs to no optimiser group \(tower\)"):
        assign_groups([Group("tower", (r"tower\..*",))], ["tower.kernel", "head.kernel"])


def test_first_of_two_matching_groups_counts():
    groups = [Group("one", (r"a\..*",)), Group("two", (r".*",))]
    assert {k: g.name for k, g in assign_groups(groups, ["a.x", "ab.x"]).items()} == {"a.x": "one", "ab.x": "two"}


def test_learning_rate_follows_the_schedule_and_its_group():
    """With a constant gradient and no decay, every update of Adam is the learning rate."""
    groups = assign_groups([Group("slow", ("b",), lr_scale=0.5), Group("all", (".*",))], ["a", "b"])
    optimizer = adamw(lambda s: 0.1 / (1.0 + s), groups, betas=(0.9, 0.95), eps=0.0, clip_norm=0.0)
    params = {"a": jnp.float32(0), "b": jnp.float32(0)}
    state, steps = optimizer.init(params), []
    for _ in range(3):
        updates, state = optimizer.update({"a": jnp.float32(2), "b": jnp.float32(-7)}, state, params)
        steps.append((float(updates["a"]), float(updates["b"])))
    assert np.allclose(steps, [(-0.1, 0.05), (-0.05, 0.025), (-0.1 / 3, 0.05 / 3)], rtol=1e-5)


def test_small_updates_are_not_rounded_away():
    """1.0 with a constant gradient of 1e-3, AdamW at 1e-3, 100 steps: near 0.9 in float32; bfloat16 would not move."""
    groups = assign_groups([Group("all", (".*",))], ["w"])
    gradients = [{"w": jnp.float32(1e-3)}] * 100
    params, state = run({"w": jnp.float32(1.0)}, gradients, groups, lambda step: 1e-3)
    assert float(params["w"]) == pytest.approx(0.9, abs=1e-4)
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32} == {jnp.dtype(jnp.float32)}

    low = jnp.bfloat16(1.0)
    for _ in range(100):
        low = low - jnp.bfloat16(1e-3)
    assert float(low) == 1.0


def test_average_has_no_bias_correction():
    """e <- d e + (1 - d) p, from the initial parameters, after each update (openpi)."""
    ema, expected = {"w": jnp.float32(1.0)}, 1.0
    for value in (2.0, 4.0, -1.0):
        ema = average(ema, {"w": jnp.float32(value), "frozen": jnp.float32(9.0)}, 0.9)
        expected = 0.9 * expected + 0.1 * value
    assert ema.keys() == {"w"} and float(ema["w"]) == pytest.approx(expected, rel=1e-6)
    slow = average({"w": jnp.float32(1.0)}, {"w": jnp.float32(1.001)}, 0.999)
    assert float(slow["w"]) == pytest.approx(1.000001, abs=1e-7) and slow["w"].dtype == jnp.float32
