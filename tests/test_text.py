"""Text: pieces of a stream against the whole, stop strings however the text is cut, tokens that stop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore.generation._stops import OutputText, Stops, StopStrings, stop_strings, stop_tokens
from statecore.generation._text import TextStream
from statecore.models._tokenizer import ByteTokenizer


class SpaceTokenizer:
    """Words that carry their space, whose first is stripped; tokens without text; bytes from 16 on."""

    WORDS = ["", " a", " bc", "d", " ", "  ", "\n", " é"]

    def encode(self, text):
        return [16 + byte for byte in text.encode()]

    def decode(self, tokens):
        raw = b"".join(self.WORDS[t % 8].encode() if t < 16 else bytes([t - 16]) for t in tokens)
        return raw.decode(errors="replace").removeprefix(" ")


class FallbackTokenizer:
    """Runs of bytes that are not UTF-8 as a whole decode to one U+FFFD a byte, as byte-fallback decoders do."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        text, run = "", b""
        for token in [*tokens, 256]:
            if token >= 128 and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            text, run = text + (chr(token) if token < 128 else ""), b""
        return text


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens it decodes."""

    decoded = 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        return super().decode(tokens)


def pieces(stream, tokens):
    parts = []
    for token in tokens:
        stream, piece = stream.push(token)
        parts.append(piece)
    return stream, parts


# Bytes: any, of text, and text with damage.
random_bytes = st.lists(st.integers(0, 255), max_size=80)
text_bytes = st.text(max_size=40).map(lambda text: list(text.encode()))
damaged = st.lists(st.one_of(text_bytes, st.lists(st.integers(128, 255), max_size=4)), max_size=6).map(
    lambda parts: sum(parts, [])
)
byte_lists = st.one_of(random_bytes, text_bytes, damaged)


@given(tokens=byte_lists)
def test_pieces_joined_are_the_whole(tokens):
    tokenizer = ByteTokenizer()
    stream, parts = pieces(TextStream(tokenizer=tokenizer), tokens)
    assert tokenizer.decode(tokens).startswith("".join(parts))
    stream, rest = stream.flush()
    assert "".join(parts) + rest == tokenizer.decode(tokens)
    assert stream.flush()[1] == ""


@given(tokens=st.lists(st.one_of(st.integers(0, 15), st.integers(16, 16 + 255)), max_size=80))
def test_pieces_joined_are_the_whole_where_decoding_depends_on_neighbours(tokens):
    tokenizer = SpaceTokenizer()
    stream, parts = pieces(TextStream(tokenizer=tokenizer), tokens)
    assert "".join(parts) + stream.flush()[1] == tokenizer.decode(tokens)


@given(tokens=text_bytes)
def test_pieces_of_byte_fallback_are_the_whole(tokens):
    tokenizer = FallbackTokenizer()
    stream, parts = pieces(TextStream(tokenizer=tokenizer), tokens)
    assert "".join(parts) + stream.flush()[1] == tokenizer.decode(tokens)


@given(tokens=st.lists(st.sampled_from([*"aé€😀".encode(), 255]), max_size=60))
def test_text_that_is_taken_back_is_refused_and_never_wrong(tokens):
    """A byte that makes the whole run before it invalid, when part of that run was given out."""
    tokenizer = FallbackTokenizer()
    try:
        stream, parts = pieces(TextStream(tokenizer=tokenizer), tokens)
        rest = stream.flush()[1]
    except sc.UnsupportedError as error:
        assert "given out before" in str(error)
        return
    # Further back than the stream looks, a run of this length cannot be told from another.
    if max(map(len, bytes(t if t < 128 else 128 for t in tokens).replace(b"a", b" ").split()), default=0) <= 8:
        assert "".join(parts) + rest == tokenizer.decode(tokens)


def test_a_character_comes_when_it_is_whole():
    stream = TextStream(tokenizer=ByteTokenizer())
    assert pieces(stream, list("a😀é!".encode()))[1] == ["a", "", "", "", "😀", "", "é", "!"]
    with pytest.raises(sc.UnsupportedError, match="given out before"):
        pieces(TextStream(tokenizer=FallbackTokenizer()), [*"é".encode(), 255, ord("a")])


@pytest.mark.parametrize("text", ["plain ", "日本語", "😀"])
def test_a_token_costs_the_same_however_long_the_text_is(text):
    tokens, tokenizer = list((text * 400).encode()), CountingTokenizer()
    pieces(TextStream(tokenizer=tokenizer), tokens)
    assert tokenizer.decoded < 40 * len(tokens)
    broken = CountingTokenizer()
    pieces(TextStream(tokenizer=broken), [255] * 2000)
    assert broken.decoded < 40 * 2000


def test_a_stream_is_a_value():
    half, _ = pieces(TextStream(tokenizer=ByteTokenizer()), list("a€".encode())[:-1])
    first, second = half.push("€".encode()[-1]), half.push(ord("b"))
    assert first[1] == "€" and second[1] == "\ufffdb"
    assert half.push("€".encode()[-1])[1] == "€"


# Stop strings.


def by_definition(text, stops):
    """The text before the match that ends first (the longest of those), feeding one character at a time."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scanned(stops, cut):
    text, held, match = "", "", None
    for piece in cut:
        part, held, match = stops.scan(held, piece)
        text += part
        if match:
            return text, match
        # What is held is the shortest that may still matter, and always a beginning.
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops.strings)
    return text + held, match


few = st.text("abc", max_size=24)


@given(
    text=few,
    strings=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_stop_strings_by_definition_however_the_text_is_cut(text, strings, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cut = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert scanned(StopStrings(strings=tuple(strings)), cut) == by_definition(text, strings)


def test_overlapping_stop_strings():
    both = StopStrings(strings=("abcd", "bc"))
    assert scanned(both, ["abcd"]) == scanned(both, list("abcd")) == ("a", "bc")
    assert scanned(StopStrings(strings=("bc", "abc")), ["xabc"]) == ("x", "abc")
    assert scanned(StopStrings(strings=("aab",)), list("aaab")) == ("a", "aab")


@pytest.mark.parametrize(
    ("strings", "named"),
    [
        ([""], "before its first character"),
        (["ok", "\ufffd"], "never match"),
        (["a\ud800"], "never match"),
        ([3], "not a string"),
    ],
)
def test_stop_strings_that_can_never_match_are_refused(strings, named):
    with pytest.raises(sc.UnsupportedError, match=named):
        stop_strings(strings, ByteTokenizer())


class LowerTokenizer(ByteTokenizer):
    """Lowers text, and knows no digits."""

    def encode(self, text):
        return [byte for byte in text.lower().encode() if not 48 <= byte < 58]


def test_stop_strings_are_checked_against_the_tokenizer():
    assert stop_strings("end", LowerTokenizer()).strings == ("end",)
    for string in ("END", "12", "a1"):
        with pytest.raises(sc.UnsupportedError, match="never match"):
            stop_strings([string], LowerTokenizer())
    # The first space of a text is stripped, but one inside it is not.
    assert stop_strings([" x", "\n"], SpaceTokenizer()).strings == (" x", "\n")
    assert stop_strings(["a", "a"], ByteTokenizer()).strings == ("a",)
    assert stop_strings([], None).strings == ()
    with pytest.raises(sc.UnsupportedError, match="tokenizer"):
        stop_strings(["a"], None)


def test_stop_tokens_are_checked():
    assert stop_tokens(3, 8) == {3} and stop_tokens([3, 5], 8) == {3, 5} and stop_tokens((), 8) == set()
    for wrong in (8, -1, [1.5], [True]):
        with pytest.raises(sc.GeometryError):
            stop_tokens(wrong, 8)


# Outputs: tokens, text and stops together.


def output(*strings, tokens=()):
    stops = Stops(strings=stop_strings(strings, ByteTokenizer()), tokens=frozenset(tokens))
    return OutputText(stream=TextStream(tokenizer=ByteTokenizer()), stops=stops)


@given(
    text=st.text("abé€", max_size=30),
    strings=st.lists(st.text("abé€", min_size=1, max_size=3), max_size=2),
    cut=st.integers(0, 60),
)
def test_a_stop_string_across_a_saved_boundary(text, strings, cut):
    """NC1: what is held of characters and of stop strings is in the value, so a saved one goes on the same."""
    tokens = list(text.encode())
    wanted, match = by_definition(text, strings)
    saved, before = pieces(output(*strings), tokens[:cut])
    for _ in range(2):
        after, rest = pieces(saved, tokens[cut:])
        ended, last = after.flush()
        assert "".join(before + rest) + last == wanted
        assert (after.finish, after.match) == (None if match is None else "stop_string", match)
        assert ended.held == ""
    # After its end an output takes nothing.
    assert match is None or after.push(97) == (after, "")


def test_a_stop_token_ends_an_output_and_has_no_text():
    ended, parts = pieces(output("abc", tokens=[0]), [*b"xab", 0])
    assert (parts, ended.finish, ended.match, ended.held) == (["x", "", "", "ab"], "stop_token", 0, "")
    # Half a character before it is given out as what it is.
    ended, parts = pieces(output(tokens=[0]), [ord("x"), 0xE2, 0])
    assert (parts, ended.finish) == (["x", "", "\ufffd"], "stop_token")
    silent = OutputText(stream=None, stops=Stops(tokens=frozenset([4])))
    ended, parts = pieces(silent, [1, 4])
    assert (parts, ended.finish, ended.match) == (["", ""], "stop_token", 4)
    assert silent.flush() == (silent, "")
