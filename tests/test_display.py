"""What states, geometries, sequences, slots, branches and diffs look like."""

from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from helpers import CAPACITY, cases
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore import display, ssm
from statecore import planes as pl
from statecore.state import diff, patch

NASTY = "<script>alert('x')</script>&\"'"
VOID = {"br", "meta", "hr", "col"}


class Reader(HTMLParser):
    """Checks that tags are balanced, and gathers tags, attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} closed out of turn"

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts)

    def named(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]


def read(thing):
    """Returns what a notebook shows of `thing`: well-formed, and nothing from elsewhere."""
    html = thing._repr_html_()
    found = Reader(html)
    assert "http" not in html and not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.elements}
    assert not [name for _, attributes in found.elements for name in attributes if name in ("src", "href", "onload")]
    return found


@pytest.fixture(scope="module")
def state(tiny):
    state = tiny.backend.init(tiny.params, batch=2, capacity=CAPACITY)
    tokens = [list(b"Good morrow."), list(b"Good even...")]
    return sc.extend(tiny.backend, tiny.params, state, tokens, num_valid=[10, 4])[0]


def test_a_geometry_shows_every_plane(tiny):
    geometry = tiny.geometry(batch=2, capacity=CAPACITY)
    found = read(geometry)
    for plane in geometry.planes:
        for words in (plane.path, plane.plane.kind, plane.plane.undone_by, f"{plane.nbytes:,}", str(plane.dtype)):
            assert words in found.text, words


def test_a_state_is_drawn_to_scale(tiny, state):
    """Each plane's frames are as wide as its bytes, and an append plane is filled as far as it is used."""
    shown = display.show(state, tiny.backend)
    found = read(shown)
    rects = [attributes for attributes in found.named("rect") if attributes.get("fill-opacity")]
    frames = [rect for rect in rects if rect["fill-opacity"] == "0.18"]
    by_row = {}
    for rect in frames:
        by_row.setdefault(float(rect["y"]), []).append(float(rect["width"]))
    geometry = tiny.geometry(batch=2, capacity=CAPACITY)
    rows = [by_row[y] for y in sorted(by_row)]
    largest = max(plane.nbytes for plane in geometry.planes)
    for plane, layers in zip(geometry.planes, rows, strict=True):
        if plane.nbytes / largest > 0.01:
            assert sum(layers) == pytest.approx(480 * plane.nbytes / largest, abs=0.1)
            assert len(layers) == len(plane.plane.layers or (0,))
    key = [plane.path for plane in geometry.planes].index("key")
    fills = [rect for rect in rects if rect["fill-opacity"] == "0.85" and float(rect["y"]) // 30 == key]
    fills = [float(rect["width"]) for rect in fills]
    assert fills == pytest.approx([sum(rows[key]) * length / CAPACITY for length in (10, 4)], abs=0.02)
    assert "10 of 40, 4 of 40" in found.text and "next row 10 of 96, 4 of 96" in found.text
    assert "tokens 10, 4" in found.text
    assert "hidden" in str(shown) and "tokens: 10, 4" in str(shown)


def test_a_patched_and_a_refused_state_say_so(tiny, state):
    new = patch(state, "hidden", jnp.copy, planes=tiny.backend)
    assert "patched" in read(display.show(new, tiny.backend)).text
    assert "patched" not in read(display.show(state, tiny.backend)).text
    full = jax.jit(lambda s: sc.step(tiny.backend, tiny.params, s, jnp.array([999, 0]))[0])(state)
    found = read(display.show(full, tiny.backend)).text
    assert "refused" in found and "tokens 10, 4" in found


def test_a_donated_state_is_refused(tiny, state):
    gone = sc.capture(state)
    sc.step(tiny.backend, tiny.params, gone, [1, 2], donate=True)
    with pytest.raises(sc.StateConsumedError):
        display.show(gone, tiny.backend)
    with pytest.raises(sc.GeometryError):
        display.show({"h": jnp.ones(2)}, tiny.backend)


def test_a_sequence_shows_what_is_kept_of_it():
    case = cases()["decay"]
    seq = ssm.begin(case.backend, case.state(), ring_slots=3)
    seq = ssm.extend(case.params, seq, [[1, 2, 3], [4, 5, 6]])[0]
    text = read(seq).text
    assert "checkpoint none" in text and "patched no" in text and "open window none" in text
    seq = ssm.checkpoint(ssm.save_ring(ssm.patch(seq, "h", lambda h: h + 1)))
    seq, _ = ssm.verify(case.params, seq, [[1, 2], [3, 4]])
    text = read(seq).text
    for words in ("checkpoint at 3, 3", "patched h", "slot 0 at 3", "2 rows, unresolved", "select"):
        assert words in text
        assert words.split()[0] in str(display.show_sequence(seq))


def test_a_slot_says_whether_it_can_be_used(tiny):
    runtime = sc.Runtime(tiny, capacity=CAPACITY)
    slot = runtime.capture()
    assert "of this load yes" in read(display.show_slot(slot, tiny)).text
    assert "it would be refused" in read(display.show_slot(slot, sc.load("tiny-hybrid"))).text
    runtime.exchange(slot)
    with pytest.raises(sc.StateConsumedError):
        display.show_slot(slot, tiny)


def test_a_diff_is_a_table(tiny, state):
    new = patch(state, "layers.5.hidden", lambda part: part.at[1, 0, 0, 3].set(7), planes=tiny.backend)
    found = read(diff(state, new, planes=tiny.backend))
    for words in ("layers.5.hidden", "sequence 1, [3, 1, 0, 0, 3]"):
        assert words in found.text
    assert len(found.named("tr")) == 2
    assert "No bit differs" in read(diff(state, state, planes=tiny.backend)).text


@st.composite
def trees(draw, depth=3):
    children = draw(st.lists(trees(depth=depth - 1), max_size=3)) if depth else []
    return display.TreeNode(
        name=draw(st.text(max_size=8)),
        tokens=draw(st.integers(0, 10**6)),
        num_bytes=draw(st.none() | st.integers(0, 2**40)),
        is_running=draw(st.booleans()),
        note=draw(st.text(max_size=8)),
        children=tuple(children),
    )


@given(trees())
def test_any_tree_can_be_drawn(root):
    nodes = list(root.walk())
    found = read(root)
    assert len(found.named("circle")) == len(nodes)
    assert len(found.named("path")) == len(nodes) - 1
    filled = [circle for circle in found.named("circle") if circle["fill"] != "none"]
    assert len(filled) == sum(node.is_running for _, node in nodes)
    height = float(found.named("svg")[0]["height"])
    for circle in found.named("circle"):
        assert 0 <= float(circle["cx"]) <= 350 and 0 <= float(circle["cy"]) <= height
    largest = max((node.num_bytes or 0 for _, node in nodes), default=0)
    for (_, node), rect in zip(nodes, found.named("rect"), strict=True):
        share = (node.num_bytes or 0) / largest if largest else 0
        assert float(rect["width"]) == pytest.approx(max(1, 190 * share), abs=0.01)
        assert f"{node.tokens:,} tokens" in found.text


def test_a_tree_as_text():
    leaf = display.TreeNode(name="b", tokens=3, num_bytes=2048, is_running=True, note="two leases")
    root = display.TreeNode(name="a", tokens=2, num_bytes=None, children=(leaf,))
    assert str(root).splitlines() == ["- a: 2 tokens, unknown bytes", "  * b: 3 tokens, 2.0 KiB (two leases)"]


emissions = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.text(max_size=4)).map(
        lambda found: display.Emission(
            num_drafted=max(found[:2]), num_accepted=min(found[:2]), num_tokens=min(found[:2]) + 1, text=found[2]
        )
    ),
    max_size=60,
)


@given(emissions)
def test_speculation_draws_a_square_a_token(items):
    found = Reader(display.speculation_html(items))
    squares = found.named("rect")
    hollow = [rect for rect in squares if rect["fill"] == "none"]
    assert len(hollow) == sum(item.num_drafted - item.num_accepted for item in items)
    assert len(squares) - len(hollow) == sum(item.num_tokens for item in items)
    for picture in found.named("svg"):
        assert float(picture["height"]) > 0
    assert all(float(rect["y"]) >= 0 for rect in squares)
    colored = [span for span in found.named("span") if "background" in (span.get("style") or "")]
    assert len(colored) == sum(item.num_drafted > 0 for item in items)


def test_everything_is_escaped():
    planes = {NASTY: pl.recurrent(layer_axis=1, layers=(0, 1)), "pos": pl.position()}

    def init(params, batch, capacity):
        return {NASTY: jnp.zeros((batch, 2)), "pos": jnp.zeros(batch, jnp.int32)}

    def step(params, state, tokens):
        return state | {"pos": state["pos"] + 1}, state[NASTY]

    backend = sc.Backend(init=init, step=step, planes=planes, name=NASTY)
    state = backend.init(None, capacity=4)
    changed = patch(state, NASTY, lambda part: part + 1, planes=backend)
    things = [
        backend.geometry(None, capacity=4),
        display.show(state, backend),
        ssm.begin(backend, state),
        diff(state, changed, planes=backend),
        display.TreeNode(name=NASTY, tokens=1, num_bytes=1, note=NASTY),
    ]
    for thing in things:
        assert NASTY in read(thing).text
    item = display.Emission(num_drafted=1, num_accepted=1, num_tokens=2, text=NASTY)
    assert NASTY in Reader(display.speculation_html([item])).text
    assert "<script" not in display.speculation_html([item])
    assert Reader(display.element("p", NASTY, title=NASTY)).named("p") == [{"title": NASTY}]


def test_empty_and_huge_things_can_be_drawn():
    node = display.TreeNode(name="chain", tokens=0, num_bytes=0)
    for _ in range(200):
        node = display.TreeNode(name="chain", tokens=0, num_bytes=0, children=(node,))
    assert all(float(circle["cx"]) <= 350 for circle in read(node).named("circle"))
    case = cases()["decay"]
    many = case.backend.init(case.params, batch=64, capacity=3)
    assert len(read(display.show(many, case.backend)).named("rect")) < 40
    assert Reader(display.speculation_html([])).elements
