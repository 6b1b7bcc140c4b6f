import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from model_loader.byte_alphabet import byte_alphabet
from model_loader.errors import FormatError, LoaderError, SourceMissing, TextError, UnsupportedArchitecture
from model_loader.gguf_tokenizer import build_tokenizer
from model_loader.manifest import Manifest
from model_loader.tokenizer import Detokenizer, Tokenizer
from model_loader.vocabulary import Vocabulary
from tests.support.checkpoints import make_tiny_tokenizer

CORPUS = (
    "", " ", "  ", "\n", "\n\n \t x", "Hello, world!", "I'm sure they'll say we've don't", "x" * 300, "a b  c   d    e",
    "12345 and 3.14159, 1,000,000", "in 2024", "naïve café — “quotes”", "你好，世界", "こんにちは", "Привет, мир",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 end",
    "def f(x):\n    return x * 2\n\n\tclass A:\n", "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "a<|im_end|>b",
    "<|im_",
    "<repo_name>x<file_sep>", "\u0000\u0001\x7f", "e\u0301 \u200b\ufeff", "ﷺ Ω≈ç√∫", "tab\there\r\nthere",
    "؟ مرحبا", "½ and ²",
    "https://example.org/?a=b&c=%20", "{\"json\": [1, 2, {\"k\": null}]}", "A" * 40 + "  " + "B" * 40,
    "..!!??--__//\\\\",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Reference]:
    folder = tmp_path_factory.mktemp("tokenizer")
    reference = make_tiny_tokenizer()
    reference.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder), reference


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 511), max_size=30), skip=st.booleans())
def test_pieces_joined_are_what_the_library_decodes(
    tiny_tokenizer: tuple[Tokenizer, Reference], ids: list[int], skip: bool
) -> None:
    tokenizer, reference = tiny_tokenizer
    detokenizer = Detokenizer(tokenizer, (), skip)
    text = "".join(detokenizer.push(number) for number in ids) + detokenizer.flush()
    assert text == reference.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip)


def test_a_text_comes_back_and_begins_as_the_model_expects(tiny_tokenizer: tuple[Tokenizer, Reference]) -> None:
    tokenizer, reference = tiny_tokenizer
    for text in CORPUS:
        assert tokenizer.encode(text, True) == [reference.token_to_id("<|begin|>"), *tokenizer.encode(text, False)]
        assert tokenizer.decode(tokenizer.encode(text, False)) == text
    assert tokenizer.vocab_size == reference.get_vocab_size()


def test_an_id_beyond_the_vocabulary_says_nothing(tiny_tokenizer: tuple[Tokenizer, Reference]) -> None:
    tokenizer, _ = tiny_tokenizer
    assert tokenizer.token_bytes(100_000) == tokenizer.token_bytes(-1) == b""
    assert not tokenizer.is_special(100_000)


def test_half_a_surrogate_pair_is_an_error_of_its_own(tiny_tokenizer: tuple[Tokenizer, Reference]) -> None:
    with pytest.raises(TextError, match="surrogate"):
        tiny_tokenizer[0].encode("a\ud800b", True)


def test_the_vocabulary_file_is_bounds_checked(tiny_tokenizer: tuple[Tokenizer, Reference], tmp_path: Path) -> None:
    document = json.loads(tiny_tokenizer[1].to_str())
    vocabulary = Vocabulary.from_tokenizer(document, "x")
    path = tmp_path / "vocabulary.bin"
    path.write_bytes(vocabulary.to_bytes())
    again = Vocabulary.load(path)
    assert [again.piece(n) for n in range(again.size)] == [vocabulary.piece(n) for n in range(vocabulary.size)]
    for content in (b"", vocabulary.to_bytes()[:-1], vocabulary.to_bytes() + b"x", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(FormatError):
            Vocabulary.load(path)


@pytest.mark.parametrize(
    "document", [{}, {"model": {"vocab": 3}}, {"model": {"vocab": {"a": -1}}}, {"model": {"vocab": {"a": 1 << 40}}}]
)
def test_a_malformed_tokenizer_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(LoaderError):
        Vocabulary.from_tokenizer(document, "x")


def test_an_unknown_decoder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match="WordPiece"):
        Vocabulary.from_tokenizer({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}, "x")


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_decoding_needs_neither_tokenizers_nor_numpy(smollm2: Manifest) -> None:
    code = (
        "import sys; from pathlib import Path; from model_loader.tokenizer import Tokenizer, Detokenizer;"
        "d = Detokenizer(Tokenizer.load(Path(sys.argv[1])), ());"
        "print(d.push(19556), end='');"
        "print(sorted({'tokenizers', 'numpy', 'torch', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2.directory)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Hello[]\n"


# --- out of GGUF metadata ---------------------------------------------------------------------------------------


def sentencepiece_metadata() -> dict[str, object]:
    words = [
        "▁the",
        "▁cat",
        "▁sat",
        "▁on",
        "▁a",
        "▁mat",
        "th",
        "he",
        "at",
        "▁c",
        "▁s",
        "▁m",
        "▁o",
        "▁t",
        "▁th",
        "▁sa",
        "▁ca",
        "▁ma",
    ]
    characters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "é"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words, *characters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(characters))]
    scores = [0.0] * 259 + [-float(n) for n in range(len(words) + len(characters))]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def test_a_sentencepiece_vocabulary_tokenises_as_transformers_does() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = sentencepiece_metadata()
    ours = Reference.from_str(build_tokenizer(metadata, "x").decode())
    theirs, _ = mapping.convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "llama",
            "tokens": metadata["tokenizer.ggml.tokens"],
            "scores": metadata["tokenizer.ggml.scores"],
            "token_type": metadata["tokenizer.ggml.token_type"],
        },
    )
    for text in ("the cat sat on a mat.", "  the  cat", "café, 12 🎉", "</s>the<s>", "that", *CORPUS):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids, (
            text
        )
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("the").ids[0] == 1


def test_sentencepiece_pieces_give_text_that_continues_a_prompt() -> None:
    document = json.loads(build_tokenizer(sentencepiece_metadata(), "x"))
    vocabulary = Vocabulary.from_tokenizer(document, "x")
    reference = Reference.from_str(json.dumps(document))
    ids = reference.encode("the cat 🎉 sat é", add_special_tokens=False).ids
    assert b"".join(vocabulary.piece(n) for n in ids).decode() == " the cat 🎉 sat é"
    assert vocabulary.is_special(1)
    assert not vocabulary.is_special(3)


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "newest",
        "tokenizer.ggml.tokens": list(byte_alphabet().values()),
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UnsupportedArchitecture, match="newest"):
        build_tokenizer(metadata, "x")


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_a_byte_level_vocabulary_tokenises_as_transformers_does(pre: str) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    tiny = json.loads(make_tiny_tokenizer().to_str())
    texts = {number: text for text, number in tiny["model"]["vocab"].items()}
    tokens = [texts[n] for n in range(len(texts))]
    kinds = [3 if n < 6 else 1 for n in range(len(tokens))]
    merges = [" ".join(pair) for pair in tiny["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
    }  # fmt: skip
    ours = Reference.from_str(build_tokenizer(metadata, "x").decode())
    theirs, _ = mapping.convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": tokens,
            "token_type": kinds,
            "merges": merges,
        },
    )
    # transformers adds that special token where a vocabulary lacks it
    for text in (t for t in CORPUS if "<|endoftext|>" not in t):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids, (
            text
        )
