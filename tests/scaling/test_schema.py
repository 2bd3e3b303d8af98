"""The scaling schema: SomaSpeed's file passes as it is, ours is written alike, everything else is refused by name."""

import copy
import json
import math
import os
from pathlib import Path

import pytest

from somaspeed_jax.scaling import schema

SOMASPEED = Path(__file__).parents[1] / "fixtures" / "somaspeed_scaling.json"


def strict(path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def test_somaspeed_file_is_accepted_and_written_back_the_same(tmp_path):
    content = schema.read(SOMASPEED)
    assert content.system == "SomaSpeed"
    assert [len(records) for records in content.models.values()] == [3, 3, 3]
    schema.write(tmp_path / "copy.json", content)
    # Text, not only values: the same keys, types, order and layout. Efficiency is a rounding apart: the next test.
    pairs = zip(SOMASPEED.read_text().split("\n"), (tmp_path / "copy.json").read_text().splitlines(), strict=True)
    assert [(a, b) for a, b in pairs if a != b and "efficiency_percent" not in a] == []


def test_efficiency_of_somaspeed_equals_their_definition():
    for records in schema.read(SOMASPEED).models.values():
        for record in records:
            assert math.isclose(schema.efficiency(record, records[0]), record.efficiency_percent, rel_tol=1e-12)


def test_our_file_has_their_keys_types_and_order(tmp_path):
    path = tmp_path / "ours.json"
    schema.add(path, [schema.measured("pi05", 1, 8, [(800, 20.0)]), schema.measured("pi05", 2, 8, [(1600, 25.0)])])
    ours, theirs = strict(path), strict(SOMASPEED)
    assert list(ours) == list(theirs)
    record, model = ours["models"]["pi05"][1], theirs["models"]["pi05"][1]
    assert [(k, type(v)) for k, v in record.items()] == [(k, type(v)) for k, v in model.items()]
    assert ours["system"] == "SomaSpeed JAX"
    assert record["system"] == "somaspeed_jax"
    assert record["complete"] == "True"
    assert '"gpus": 2.0' in path.read_text()
    assert record["samples_per_second"] * record["measured_training_seconds"] == 1600
    assert record["efficiency_percent"] == 80.0
    assert schema.read(path) == schema.add(path, [])


def test_trials_give_total_rate_minimum_and_maximum():
    record = schema.measured("groot", 1, 80, [(100, 10.0), (100, 5.0)])
    assert (record.minimum_samples_per_second, record.maximum_samples_per_second) == (10.0, 20.0)
    assert record.samples_per_second == pytest.approx(200 / 15)
    assert (record.trials, record.measured_training_seconds) == (2, 15.0)


def test_one_trial_is_its_own_minimum_and_maximum():
    for samples, seconds in [(19237, 480.00860), (7, 0.3), (55_456, 480.4081111)]:
        record = schema.measured("groot", 1, 1, [(samples, seconds)])
        assert record.minimum_samples_per_second == record.samples_per_second == record.maximum_samples_per_second


def test_records_are_sorted_replaced_and_efficiency_follows(tmp_path):
    path = tmp_path / "ours.json"
    schema.add(path, [schema.measured("pi05", n, 8, [(80 * n, 10.0)]) for n in (4, 1, 2)])
    schema.add(path, [schema.measured("molmoact2", 1, 24, [(240, 10.0)])])
    content = schema.add(path, [schema.measured("pi05", 1, 8, [(160, 10.0)])])
    assert list(content.models) == ["molmoact2", "pi05"]
    assert [r.gpus for r in content.models["pi05"]] == [1, 2, 4]
    assert [r.efficiency_percent for r in content.models["pi05"]] == [100.0, 50.0, 50.0]


def test_failed_run_is_zero_and_false(tmp_path):
    path = tmp_path / "ours.json"
    schema.add(path, [schema.measured("pi05", 1, 8, [(80, 10.0)]), schema.failed("pi05", 2, 8, trials=3)])
    record = strict(path)["models"]["pi05"][1]
    assert record["complete"] == "False"
    assert {record[k] for k in (*schema.MEASURED, "efficiency_percent")} == {0.0}


def test_efficiency_is_zero_while_one_device_failed(tmp_path):
    path = tmp_path / "ours.json"
    content = schema.add(path, [schema.failed("pi05", 1, 8, 1), schema.measured("pi05", 2, 8, [(80, 10.0)])])
    assert [r.efficiency_percent for r in content.models["pi05"]] == [0.0, 0.0]
    assert schema.read(path) == content


def test_never_added_to_another_system(tmp_path):
    path = tmp_path / "theirs.json"
    path.write_text(SOMASPEED.read_text())
    with pytest.raises(schema.SchemaError, match=r"theirs\.json: system is 'SomaSpeed'.*--output"):
        schema.add(path, [schema.measured("pi05", 1, 8, [(80, 10.0)])])
    assert path.read_text() == SOMASPEED.read_text()


def test_a_list_without_one_device_is_refused(tmp_path):
    path = tmp_path / "ours.json"
    with pytest.raises(schema.SchemaError, match=r"models\.pi05: device counts \[2, 4\] lack 1"):
        schema.add(path, [schema.measured("pi05", n, 8, [(80, 10.0)]) for n in (2, 4)])
    assert list(tmp_path.iterdir()) == []


def test_another_batch_per_device_is_refused_and_the_file_kept(tmp_path):
    path = tmp_path / "ours.json"
    schema.add(path, [schema.measured("pi05", 1, 8, [(80, 10.0)])])
    before = path.read_bytes()
    with pytest.raises(schema.SchemaError, match=r"models\.pi05\[1\]\.per_gpu_batch: found 16, expected 8"):
        schema.add(path, [schema.measured("pi05", 2, 16, [(80, 10.0)])])
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "ours.json"
    schema.add(path, [schema.measured("pi05", 1, 8, [(80, 10.0)])])
    before = path.read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        schema.add(path, [schema.measured("pi05", 2, 8, [(80, 10.0)])])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("trials", [[], [(0, 1.0)], [(8, 0.0)]])
def test_nothing_measured_is_refused(trials):
    with pytest.raises(ValueError, match="no measurement"):
        schema.measured("pi05", 1, 8, trials)


def change(field, value, model="pi05", index=1):
    def edit(document):
        document["models"][model][index][field] = value

    return edit


def drop(field):
    return lambda document: document["models"]["pi05"][1].pop(field)


def reorder(document):
    record = document["models"]["pi05"][1]
    record["model"] = record.pop("model")


BAD = {
    "integer": (change("gpus", 2), r"pi05\[1\]\.gpus: found int 2, expected a float"),
    "fraction": (change("gpus", 2.5), r"gpus: found 2\.5, expected a whole number"),
    "truth": (change("complete", True), r'complete: found bool true, expected the text "True" or "False"'),
    "text number": (change("trials", "1.0"), r"trials: found str \"1\.0\""),
    "negative": (change("samples_per_second", -1.0), r"samples_per_second: found float -1\.0"),
    "missing": (drop("trials"), r"pi05\[1\]: keys .*expected exactly"),
    "extra": (change("note", "x"), r"pi05\[1\]: keys .*note; expected exactly"),
    "order": (reorder, r"pi05\[1\]: keys .*in this order"),
    "wrong model": (change("model", "groot"), r"pi05\[1\]\.model: found 'groot', expected 'pi05'"),
    "wrong system": (change("system", "lerobot"), r"system: found 'lerobot', expected 'somaspeed'"),
    "global batch": (change("global_batch", 8.0), r"global_batch: found 8, expected 16 = gpus x per_gpu_batch"),
    "efficiency": (change("efficiency_percent", 99.0), r"efficiency_percent: found 99\.0, expected 91\.496"),
    "incomplete": (
        change("complete", "False"),
        r"samples_per_second: found 79\.9.*, expected 0\.0 in a record that is not",
    ),
    "minimum": (change("minimum_samples_per_second", 80.0), r"does not hold"),
    "no seconds": (change("measured_training_seconds", 0.0), r"measured_training_seconds: found 0\.0"),
    "twice": (lambda d: d["models"]["pi05"].append(d["models"]["pi05"][1]), r"each once and in rising order"),
    "no list": (lambda d: d["models"].update(pi05=None), r"models\.pi05: found NoneType null, expected a list"),
    "no models": (lambda d: d.update(models=[]), r"models: found list \[\]"),
    "empty text": (lambda d: d.update(task=""), r"task: found str"),
    "top level": (lambda d: d.pop("task"), r"top level: keys system, measurement, models; expected"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_field(case, tmp_path):
    edit, message = BAD[case]
    document = copy.deepcopy(strict(SOMASPEED))
    edit(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(schema.SchemaError, match=r"bad\.json: .*" + message):
        schema.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"system": NaN}', "the word NaN is not JSON"),
        ('{"system": "a", "system": "b"}', "'system' appears twice"),
        ("[", "Expecting value"),
        ("[]", "top level: found list"),
    ],
)
def test_not_json_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(schema.SchemaError, match=message):
        schema.read(path)
