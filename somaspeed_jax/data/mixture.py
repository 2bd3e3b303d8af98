"""Several datasets in one run, each with its own cameras, dimensions, embodiment and statistics.

Records of all datasets share one numbering: dataset d's record i has the id `offsets[d] + i`. Everything else about a
run (pipeline, resume, workers) is as for one dataset.
"""

import fractions
import math
from collections.abc import Sequence

import numpy as np

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.order import Stream, epoch_seed
from somaspeed_jax.data.pipeline import Frames, Source, load_sample
from somaspeed_jax.data.transforms.base import Record, Sample, Transform

LARGEST_BLOCK = 1000


class MixtureOrder:
    """Records of each step of a run over several datasets; a pure function of (seed, step), like `order.Order`.

    The endless sequence of positions is cut into blocks in which every dataset has a fixed number of places, in
    proportion to the weights (as fractions with a common denominator of at most 1000). Places are shuffled in each
    block. A dataset's own records follow in its own shuffled epochs, so over any whole number of blocks its share is
    exact, and each of its records comes once in each of its epochs.

    Args:
      sizes: records of each dataset.
      weights: share of samples of each dataset, any positive scale.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], global_batch: int, seed: int):
        if len(sizes) != len(weights) or not sizes:
            raise DataError(f"{len(weights)} weights for {len(sizes)} datasets")
        if any(not math.isfinite(w) or w <= 0 for w in weights):
            raise DataError(f"weights are {list(weights)}; each must be a positive number. Leave a dataset out instead")
        if global_batch < 1:
            raise DataError(f"global batch is {global_batch}, expected at least 1")
        self.global_batch, self.seed = global_batch, seed
        self.num_records = sum(sizes)
        self.offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.places = _places(weights)
        self.block = sum(self.places)
        self._starts = np.concatenate([[0], np.cumsum(self.places)])
        self._last = -1, np.arange(0)  # a block and its shuffle, in one attribute because threads share an order
        self._streams = [Stream(size, epoch_seed(seed, 1 + d)) for d, size in enumerate(sizes)]

    def record_ids(self, step: int) -> np.ndarray:
        """int64 [global_batch], ids in the mixture's numbering."""
        first = step * self.global_batch
        return np.array([self._record(g) for g in range(first, first + self.global_batch)], np.int64)

    def counts(self, step: int) -> list[int]:
        """How many samples of each dataset the steps before `step` have drawn."""
        blocks, rest = divmod(step * self.global_batch, self.block)
        drawn = [blocks * places for places in self.places]
        for g in range(blocks * self.block, blocks * self.block + rest):
            drawn[self._place(g)[0]] += 1
        return drawn

    def dataset_of(self, ids: np.ndarray) -> np.ndarray:
        """int64 ids -> int64, which dataset each belongs to."""
        return np.searchsorted(self.offsets, ids, side="right") - 1

    def _place(self, position: int) -> tuple[int, int]:
        """(dataset, position in that dataset's own stream) of a position of the mixture."""
        block, place = divmod(position, self.block)
        last, shuffle = self._last
        if block != last:
            # a sort of random keys: index_shuffle takes milliseconds where there are only a few places
            keys = np.random.SeedSequence((self.seed, 0, block)).generate_state(self.block, np.uint64)
            shuffle = np.argsort(keys, kind="stable")
            self._last = block, shuffle
        shuffled = int(shuffle[place])
        dataset = int(np.searchsorted(self._starts, shuffled, side="right")) - 1
        return dataset, block * self.places[dataset] + shuffled - int(self._starts[dataset])

    def _record(self, position: int) -> int:
        dataset, own = self._place(position)
        return int(self.offsets[dataset]) + self._streams[dataset][own]


def _places(weights: Sequence[float]) -> list[int]:
    """Places of each dataset in a block, as small as the weights allow."""
    total = sum(fractions.Fraction(w) for w in weights)
    shares = [(fractions.Fraction(w) / total).limit_denominator(LARGEST_BLOCK) for w in weights]
    block = math.lcm(*(share.denominator for share in shares))
    if block > LARGEST_BLOCK or sum(shares) != 1:
        block = LARGEST_BLOCK
    # largest remainders: the places add up to the block, each within one of its exact share
    exact = [fractions.Fraction(w) / total * block for w in weights]
    places = [math.floor(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda d: (places[d] - exact[d], d))
    for d in by_remainder[: block - sum(places)]:
        places[d] += 1
    if 0 in places:
        d = places.index(0)
        raise DataError(
            f"dataset {d} has a weight of {float(weights[d] / float(total)):.2g} of all: below 1 in {LARGEST_BLOCK} it "
            "would never be drawn. Raise it, or leave the dataset out"
        )
    return places


class MixtureSource:
    """The records of several datasets. A record has `dataset` (int) besides, and `index` in the mixture's numbering."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        self._ends = np.cumsum([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def record(self, index: int, images: bool = True) -> Record:
        dataset, own = _locate(self._ends, index)
        return {**self.sources[dataset].record(own, images), "dataset": dataset, "index": index}


class MixtureFrames:
    """The frame caches of several datasets, each built under its own transform."""

    def __init__(self, caches: Sequence[Frames], sizes: Sequence[int]):
        self.caches = list(caches)
        self._ends = np.cumsum(sizes)

    def images(self, index: int) -> dict[str, np.ndarray]:
        dataset, own = _locate(self._ends, index)
        return self.caches[dataset].images(own)


def _locate(ends: np.ndarray, index: int) -> tuple[int, int]:
    if not 0 <= index < ends[-1]:
        raise IndexError(f"record {index} of {ends[-1]} in the mixture")
    dataset = int(np.searchsorted(ends, index, side="right"))
    return dataset, index - int(ends[dataset - 1] if dataset else 0)


def camera_views(cameras: Sequence[Sequence[str]], views: Sequence[str] = ()) -> tuple[list[str], list[list[int]]]:
    """(views of the run, and which of them each camera of each dataset fills).

    The views are `views`, or else the cameras of the dataset that has most. A camera that bears a view's name fills
    that view; the others fill what is left, in order. Raises DataError where they do not fit.
    """
    names = list(views or max(cameras, key=len))
    filled = []
    for own in cameras:
        free = [view for view, name in enumerate(names) if name not in own]
        strange = [camera for camera in own if camera not in names]
        if len(strange) > len(free):
            raise DataError(f"cameras {list(own)} do not fit into the run's views {names}: name them in data.cameras")
        place = dict(zip(strange, free, strict=False))
        filled.append([names.index(camera) if camera in names else place[camera] for camera in own])
    return names, filled


class MixtureTransform:
    """Sends each record through its dataset's transform and gives all samples the same views and the same state width.

    A dataset without a camera for a view (`camera_views`) gets a black picture there, with `image_mask` false. All
    other shapes must agree (`check_alike`): give the transforms one prompt length, action width and horizon.
    """

    def __init__(self, transforms: Sequence[Transform], views: Sequence[str] = (), state_dim: int = 0):
        self.transforms = list(transforms)
        recipes = {transform.image_recipe for transform in self.transforms}
        if len(recipes) != 1:
            raise DataError(f"datasets of one run need one picture recipe, found {sorted(recipes)}")
        self.image_recipe = recipes.pop()
        names, self._filled = camera_views([transform.cameras for transform in self.transforms], views)
        self.cameras, self._state_dim = tuple(names), state_dim

    def prepare_image(self, image: np.ndarray) -> np.ndarray:
        return self.transforms[0].prepare_image(image)

    def __call__(self, record: Record) -> Sample:
        return self._widen(self.transforms[record["dataset"]](record), record)

    def observation(self, record: Record) -> Sample:
        return self._widen(self.transforms[record["dataset"]].observation(record), record)

    def actions(self, normalised: np.ndarray, state: np.ndarray) -> np.ndarray:
        raise DataError("a mixture has no units of its own: use the transform of the dataset, `transforms[d].actions`")

    def _widen(self, sample: Sample, record: Record) -> Sample:
        blank = np.zeros_like(sample["images"][0])
        images, mask = [blank] * len(self.cameras), np.zeros(len(self.cameras), bool)
        for view, image, present in zip(
            self._filled[record["dataset"]], sample["images"], sample["image_mask"], strict=True
        ):
            images[view], mask[view] = image, present
        state = np.pad(sample["state"], (0, max(0, self._state_dim - len(sample["state"]))))
        index = np.int32(record["index"])
        return {**sample, "images": tuple(images), "image_mask": mask, "state": state, "index": index}


def check_alike(source: MixtureSource, transform: MixtureTransform, names: Sequence[str]) -> None:
    """Raises DataError naming dataset and field unless the first samples of all datasets have the same shapes."""
    first: dict[str, tuple[int, ...]] = {}
    for name, end, part in zip(names, np.cumsum([len(s) for s in source.sources]), source.sources, strict=True):
        sample = load_sample(source, transform, int(end) - len(part))
        shapes = {key: np.shape(value) for key, value in sample.items() if key != "images"}
        shapes |= {f"picture of {view}": i.shape for view, i in zip(transform.cameras, sample["images"], strict=True)}
        first = first or shapes
        for field, shape in shapes.items():
            if shape != first[field]:
                raise DataError(
                    f"data.mixture: {field} has shape {shape} in {name} and {first[field]} in {names[0]}; the datasets "
                    "of a run need one shape: choose their cameras in data.cameras, or leave one out"
                )
