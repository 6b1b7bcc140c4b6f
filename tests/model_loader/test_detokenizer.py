from hypothesis import given
from hypothesis import strategies as st

from model_loader.detokenizer import Detokenizer

ALPHABET = "abé你🎉"


class Pieces:
    """Token ids are indices into byte pieces; the last is special."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return self.pieces[token_id].startswith(b"<|")


def shown(pieces: list[bytes], stop: tuple[str, ...] = (), skip_special: bool = True) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(Pieces(*pieces), stop, skip_special)
    texts = [detokenizer.push(number) for number in range(len(pieces))]
    return [*texts, detokenizer.flush()], detokenizer.stopped


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete; of several the longest."""
    for end in range(len(text) + 1):
        hits = [s for s in stop if s and text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(content: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({min(place, len(content)) for place in places})
    return [content[a:b] for a, b in zip([0, *marks], [*marks, len(content)], strict=True)]


@given(
    text=st.text(ALPHABET, max_size=30),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4).map(tuple),
    places=st.lists(st.integers(0, 100), max_size=12),
)
def test_text_and_stop_do_not_depend_on_how_bytes_are_grouped(
    text: str, stop: tuple[str, ...], places: list[int]
) -> None:
    texts, stopped = shown(cut(text.encode(), places), stop)
    assert ("".join(texts), stopped) == reference(text, stop)


@given(content=st.binary(max_size=40), places=st.lists(st.integers(0, 40), max_size=8))
def test_any_bytes_give_what_decoding_them_at_once_gives(content: bytes, places: list[int]) -> None:
    texts, _ = shown(cut(content, places))
    assert "".join(texts) == content.decode("utf-8", "replace")


def test_an_incomplete_character_is_held_back() -> None:
    party = "🎉".encode()
    texts, _ = shown([b"a", party[:1], party[1:3], party[3:], b"b"])
    assert texts == ["a", "", "", "🎉", "b", ""]


def test_a_possible_stop_string_is_held_back_and_given_when_it_was_none() -> None:
    texts, stopped = shown([b"one ", b"st", b"ar", b" s", b"t"], ("stop",))
    assert texts == ["one ", "", "star", " ", "", "st"]
    assert stopped is None


def test_the_text_ends_before_the_stop_string_and_nothing_follows() -> None:
    texts, stopped = shown([b"one ", b"st", b"op and", b" more"], ("stop", "zzz"))
    assert texts == ["one ", "", "", "", ""]
    assert stopped == "stop"


def test_special_tokens_are_shown_only_if_asked_for() -> None:
    assert shown([b"a", b"<|end|>", b"b"])[0] == ["a", "", "b", ""]
    assert shown([b"a", b"<|end|>", b"b"], (), False)[0] == ["a", "<|end|>", "b", ""]


def test_an_empty_stop_string_stops_nothing() -> None:
    assert shown([b"abc"], ("",)) == (["abc", ""], None)
