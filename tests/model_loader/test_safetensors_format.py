import json
from pathlib import Path

import pytest

from model_loader.directory_checkpoint import describe_directory
from model_loader.errors import FormatError, SourceMissing, SourceRefused, UnsupportedArchitecture
from model_loader.safetensors_format import read_file


def rewrite_header(path: Path, change: object) -> None:
    raw = path.read_bytes()
    nbytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + nbytes])
    change(header)  # type: ignore[operator]
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + nbytes :])


@pytest.mark.parametrize("kept", [0, 5, 8, 500, -1, -1000])
def test_a_truncated_file_is_refused(tiny: Path, kept: int) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FormatError, match="truncated") as refused:
        describe_directory(tiny)
    assert str(path) in str(refused.value)


def test_bytes_that_belong_to_no_tensor_are_refused(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(FormatError, match="1 bytes that belong to no tensor"):
        read_file(path, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [1, -5]), ("shape", "x"), ("shape", [1.5]), ("dtype", 3), ("data_offsets", [0]),
        ("data_offsets", [4, 0]), ("data_offsets", None), ("shape", [2**40, 2**40]),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_refused(tiny: Path, field: str, value: object) -> None:
    path = tiny / "model.safetensors"
    rewrite_header(path, lambda header: header["model.norm.weight"].update({field: value}))
    with pytest.raises(FormatError):
        read_file(path, 0)


def test_a_quantised_tensor_is_refused_by_name(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    rewrite_header(path, lambda header: header["model.norm.weight"].update(dtype="F8_E4M3"))
    with pytest.raises(UnsupportedArchitecture, match="F8_E4M3"):
        read_file(path, 0)


def test_overlapping_tensors_are_refused(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    rewrite_header(
        path,
        lambda h: h["model.norm.weight"].update(
            data_offsets=h["model.layers.0.input_layernorm.weight"]["data_offsets"]
        ),
    )
    with pytest.raises(FormatError, match=r"begin at .* overlaps"):
        read_file(path, 0)


def test_an_indexed_set_needs_every_file_and_every_tensor(tiny: Path) -> None:
    names = [t.name for t in read_file(tiny / "model.safetensors", 0)]
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert len(describe_directory(tiny).tensors) == len(names)
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(names, "model.safetensors"), "x": "b.safetensors"}}))
    with pytest.raises(SourceMissing, match=r"lacks b\.safetensors"):
        describe_directory(tiny)
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/x.safetensors"}}))
    with pytest.raises(SourceRefused, match="only files beside it"):
        describe_directory(tiny)
    index.write_text(
        json.dumps({"weight_map": {**dict.fromkeys(names, "model.safetensors"), "y": "model.safetensors"}})
    )
    with pytest.raises(FormatError, match="tensor 'y'"):
        describe_directory(tiny)


def test_tensors_and_configuration_must_agree(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 3}, "lacks 9 tensors"),
        ({"num_hidden_layers": 1}, "its configuration does not know"),
        ({"intermediate_size": 100}, "its configuration says"),
        ({"attention_bias": True}, "lacks 8 tensors"),
    ):
        (tiny / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(FormatError, match=message):
            describe_directory(tiny)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"quantization_config": {"bits": 4}},
        {"partial_rotary_factor": 0.5},
        {"architectures": ["LlamaForSequenceClassification"]},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_would_change_the_arithmetic_is_refused(tiny: Path, change: dict[str, object]) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedArchitecture):
        describe_directory(tiny)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, 2**40])
def test_a_size_that_is_none_is_refused_with_its_name(tiny: Path, value: object) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "hidden_size": value}))
    with pytest.raises(FormatError, match="hidden_size"):
        describe_directory(tiny)


def test_a_directory_of_pickles_is_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(SourceRefused, match="pickle"):
        describe_directory(tiny)


def test_both_spellings_of_the_rotary_settings_are_read(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    del config["rope_theta"], config["rope_scaling"]
    (tiny / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling, "rope_theta": 500000.0}))
    old = describe_directory(tiny).config
    (tiny / "config.json").write_text(json.dumps({**config, "rope_parameters": {**scaling, "rope_theta": 500000.0}}))
    assert describe_directory(tiny).config == old
    assert old.rope_scaling == scaling
    assert old.rope_theta == 500000.0
