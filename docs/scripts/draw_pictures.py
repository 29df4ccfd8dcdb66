"""Draw the pictures of the concept pages: ``python docs/scripts/draw_pictures.py`` writes ``docs/images/*.svg``.

Each picture has its own background and follows the reader's colour scheme, so it can be read on light and dark pages.
`path-of-a-step.svg` is drawn by hand, in the same style.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "images"
STYLE = """
    .page { fill: #ffffff } .lane { fill: #f4f6f8 } .box { fill: #ffffff; stroke: #8c959f }
    text { font: 13px sans-serif; fill: #1f2328 } .head { font-weight: bold; font-size: 14px }
    .small { font-size: 12px; fill: #59636e } .code { font: 12px monospace } .strong { font-weight: bold }
    .leaf { fill: #dafbe1; stroke: #1a7f37 } .node { fill: #ddf4ff; stroke: #0550ae }
    .arrow { stroke: #0550ae } .grad { stroke: #bc4c00 } .plain { stroke: #8c959f } .bad { stroke: #cf222e }
    .arrow, .grad, .plain, .bad { stroke-width: 2; fill: none } .dashed { stroke-dasharray: 5 4 }
    .tip-arrow { fill: #0550ae } .tip-grad { fill: #bc4c00 } .tip-plain { fill: #8c959f } .tip-bad { fill: #cf222e }
    .text-arrow { fill: #0550ae } .text-grad { fill: #bc4c00 } .text-bad { fill: #cf222e }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .lane { fill: #171d26 } .box { fill: #0d1117; stroke: #656c76 }
      text { fill: #e6edf3 } .small { fill: #9198a1 }
      .leaf { fill: #12261e; stroke: #3fb950 } .node { fill: #0c2d6b; stroke: #79c0ff }
      .arrow { stroke: #79c0ff } .grad { stroke: #ffa657 } .plain { stroke: #656c76 } .bad { stroke: #ff7b72 }
      .tip-arrow { fill: #79c0ff } .tip-grad { fill: #ffa657 } .tip-plain { fill: #656c76 } .tip-bad { fill: #ff7b72 }
      .text-arrow { fill: #79c0ff } .text-grad { fill: #ffa657 } .text-bad { fill: #ff7b72 }
    }
"""
TIP = (
    '<marker id="{0}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
    '<path class="tip-{0}" d="M0 0 L10 5 L0 10 z"/></marker>'
)


class Picture:
    """One SVG, built up piece by piece; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="title desc">',
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="desc">{escape(description)}</desc>',
            f"  <style>{STYLE}  </style>",
            "  <defs>" + "".join(TIP.format(kind) for kind in ("arrow", "grad", "plain", "bad")) + "</defs>",
            f'  <rect class="page" width="{width}" height="{height}" rx="8"/>',
        ]

    def lane(self, x: float, y: float, width: float, height: float, head: str = "", note: str = "") -> None:
        self._lines.append(f'  <rect class="lane" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>')
        if head:
            self.text(x + 12, y + 21, head, "head", "start")
        if note:
            self.text(x + 12, y + 38, note, "small", "start")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self._lines.append(f'  <text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def node(self, x: float, y: float, text: str, kind: str = "box", width: float = 62, height: float = 26) -> None:
        """Draw a box with a text, around the point (x, y)."""
        self._lines.append(
            f'  <rect class="{kind}" x="{x - width / 2}" y="{y - height / 2}" width="{width}" height="{height}" rx="6"/>'
        )
        self.text(x, y + 4.5, text)

    def card(self, x: float, y: float, width: float, title: str, rows: list[tuple[str, str]]) -> None:
        """Draw a box with a title, and rows of a file and what happens there."""
        height = 34 + 19 * len(rows)
        self._lines.append(f'  <rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        self.text(x + 12, y + 21, title, "strong", "start")
        for number, (file, what) in enumerate(rows):
            self.text(x + 12, y + 42 + 19 * number, file, "code" if "." in file else "small", "start")
            self.text(x + width - 12, y + 42 + 19 * number, what, "small", "end")

    def line(self, kind: str, *points: tuple[float, float], dashed: bool = False, tip: bool = True) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        end = f' marker-end="url(#{kind})"' if tip else ""
        self._lines.append(f'  <path class="{kind}{" dashed" if dashed else ""}" d="M{path}"{end}/>')

    def curve(self, kind: str, start: tuple[float, float], bend: tuple[float, float], end: tuple[float, float]) -> None:
        (a, b), (c, d), (e, f) = start, bend, end
        self._lines.append(f'  <path class="{kind}" d="M{a} {b} Q{c} {d} {e} {f}" marker-end="url(#{kind})"/>')

    def __str__(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])


def recorded_messages() -> Picture:
    picture = Picture(
        760,
        372,
        "What a context records",
        "A tensor goes from the driver to worker0, back, to worker1, and back. Every message leaves a send on one "
        "worker and "
        "a recv on the other. Leaves are on the driver and on worker1.",
    )
    for y, name in ((10, "worker0"), (122, "driver"), (234, "worker1")):
        picture.lane(10, y, 740, 102, name)
    top, middle, bottom = 66, 180, 284
    picture.node(120, middle, "x", "leaf", 36)
    picture.node(190, middle, "send 1", "node")
    picture.node(230, top, "recv 1", "node")
    picture.node(310, top, "tanh")
    picture.node(390, top, "send 2", "node")
    picture.node(430, middle, "recv 2", "node")
    picture.node(520, middle, "send 3", "node")
    picture.node(520, bottom, "recv 3", "node")
    picture.node(600, bottom, "mul")
    picture.node(600, bottom + 36, "w", "leaf", 36, 22)
    picture.node(680, bottom, "send 4", "node")
    picture.node(640, middle, "recv 4", "node")
    picture.node(715, middle, "loss", "box", 48)
    for points in (
        ((138, middle), (159, middle)),
        ((261, top), (279, top)),
        ((341, top), (359, top)),
        ((461, middle), (489, middle)),
        ((551, bottom), (569, bottom)),
        ((631, bottom), (649, bottom)),
        ((671, middle), (691, middle)),
        ((600, bottom + 25), (600, bottom + 13)),
    ):
        picture.line("plain", *points)
    picture.line("arrow", (197, middle - 13), (223, top + 13))
    picture.line("arrow", (397, top + 13), (423, middle - 13))
    picture.line("arrow", (520, middle + 13), (520, bottom - 13))
    picture.line("arrow", (674, bottom - 13), (648, middle + 13))
    picture.text(196, 129, "call", "small text-arrow", "end")
    picture.text(424, 129, "result", "small text-arrow", "start")
    picture.text(527, 231, "call", "small text-arrow", "start")
    picture.text(670, 231, "result", "small text-arrow", "start")
    picture.node(40, 352, "", "leaf", 26, 16)
    picture.text(60, 356, "leaf: its gradient gathers here", "small", "start")
    picture.node(260, 352, "", "node", 26, 16)
    picture.text(280, 356, "recorded message: one id, a send and a recv", "small", "start")
    picture.text(570, 356, "gradients take the same way back", "small", "start")
    return picture


def fast_and_smart() -> Picture:
    picture = Picture(
        760,
        400,
        "FAST and SMART",
        "The result of a call to worker1 is not used. In FAST mode the driver waits for a gradient that never comes. In "
        "SMART "
        "mode worker1 and the driver compare what each of them has, and the send is settled with nothing.",
    )
    for left, name, note in (
        (10, "FAST", "every send waits for a gradient"),
        (388, "SMART", "workers compare what they have"),
    ):
        picture.lane(left, 10, 362, 380, name, note)
        picture.text(left + 20, 80, "driver", "strong", "start")
        picture.node(left + 34, 215, "x", "leaf", 36)
        picture.node(left + 120, 150, "send 1", "node")
        picture.node(left + 120, 280, "send 3", "node")
        picture.line("plain", (left + 48, 201), (left + 90, 162))
        picture.line("plain", (left + 48, 229), (left + 90, 268))
        picture.text(left + 315, 122, "worker0", "strong")
        picture.node(left + 315, 150, "exp", "box", 50)
        picture.text(left + 315, 252, "worker1", "strong")
        picture.node(left + 315, 280, "log", "box", 50)
        picture.line("arrow", (left + 152, 143), (left + 289, 143))
        picture.text(left + 220, 135, "call", "small text-arrow")
        picture.line("grad", (left + 289, 157), (left + 152, 157))
        picture.text(left + 220, 174, "gradient", "small text-grad")
        picture.line("arrow", (left + 152, 271), (left + 289, 271))
        picture.text(left + 220, 263, "call; result unused", "small text-arrow")
    picture.line("bad", (299, 289), (162, 289), dashed=True)
    picture.text(230, 308, "no gradient ever comes", "small text-bad")
    picture.text(191, 352, "The pass cannot end: it is found to be stalled", "small")
    picture.text(191, 370, "and raises UnsettledSend, which names the call.", "small")
    picture.line("grad", (540, 281), (677, 281))
    picture.line("grad", (677, 291), (540, 291))
    picture.text(598, 312, "\u201cI expect an answer for 3\u201d / \u201cno gradient for 3\u201d", "small text-grad")
    picture.text(569, 352, "The send is settled with nothing, and no zeros", "small")
    picture.text(569, 370, "are sent. The pass ends with all gradients.", "small")
    return picture


def pass_on_one_worker() -> Picture:
    picture = Picture(
        760,
        300,
        "A pass on one worker",
        "Sources on the left are roots and sends, each settled once. They reach sinks on the right: recvs, which fire "
        "once, and "
        "leaves. Sources that share a node form a component and are run together.",
    )
    picture.lane(150, 10, 460, 280, "one worker", "its part of the graph, in the direction of gradients")
    picture.node(210, 105, "send 7", "node")
    picture.node(210, 165, "send 8", "node")
    picture.node(210, 240, "root", "box", 50)
    picture.node(370, 135, "mul", "box", 50)
    picture.node(370, 240, "sum", "box", 50)
    picture.node(520, 105, "recv 2", "node")
    picture.node(520, 165, "w", "leaf", 36)
    picture.node(520, 240, "recv 5", "node")
    picture.line("grad", (241, 107), (345, 130))
    picture.line("grad", (241, 163), (345, 140))
    picture.line("grad", (395, 130), (489, 107))
    picture.line("grad", (395, 140), (502, 163))
    picture.line("grad", (235, 240), (345, 240))
    picture.line("grad", (395, 240), (489, 240))
    picture.line("grad", (20, 105), (179, 105))
    picture.line("grad", (20, 165), (179, 165))
    picture.line("grad", (551, 105), (740, 105))
    picture.line("grad", (551, 240), (740, 240))
    picture.text(80, 96, "gradient, or nothing", "small text-grad")
    picture.text(80, 156, "gradient, or nothing", "small text-grad")
    picture.text(680, 96, "gradient, or nothing", "small text-grad")
    picture.text(680, 231, "gradient, or nothing", "small text-grad")
    picture.text(370, 190, "one component: one run of torch\u2019s engine", "small")
    picture.text(370, 276, "another component: runs beside it", "small")
    picture.text(545, 169, "gathers", "small", "start")
    return picture


def shortcut() -> Picture:
    picture = Picture(
        760,
        250,
        "A shortcut",
        "The driver passes the result of worker0 on to worker1 untouched. Its gradient goes from worker1 straight to "
        "worker0.",
    )
    for left, name in ((10, "worker0"), (280, "driver"), (550, "worker1")):
        picture.lane(left, 10, 200, 150, name)
    picture.node(110, 80, "tanh")
    picture.node(380, 80, "hidden")
    picture.node(650, 80, "mul")
    picture.line("arrow", (141, 74), (349, 74))
    picture.text(245, 66, "result", "small text-arrow")
    picture.line("arrow", (411, 74), (619, 74))
    picture.text(515, 66, "call", "small text-arrow")
    picture.line("plain", (411, 96), (612, 96), dashed=True)
    picture.text(515, 116, "offer: \u201canswer worker0\u201d", "small")
    picture.curve("grad", (650, 94), (380, 330), (112, 96))
    picture.text(380, 226, "the gradient of hidden, in one message instead of two", "small text-grad")
    picture.text(380, 52, "only passed on", "small")
    return picture


def fork_of_a_reference() -> Picture:
    picture = Picture(
        760,
        320,
        "How a reference is passed on",
        "B sends C a fork of its reference. C asks the owner A to list it, A confirms, C accepts. Only then may B "
        "delete its "
        "own. When C needs the value no more, it deletes its fork, and A frees the value with the last one.",
    )
    for left, name, note in (
        (10, "C", "receives a reference"),
        (270, "B", "holds one, passes it on"),
        (530, "A", "owns the value"),
    ):
        picture.lane(left, 10, 220, 300, name, note)
        picture.line("plain", (left + 110, 58), (left + 110, 300), tip=False)
    for y, start, end, label, where in (
        (84, 380, 120, "call with the reference", 250),
        (124, 120, 640, "Adopt: list my fork", 510),
        (164, 640, 120, "Confirm", 510),
        (204, 120, 380, "Accept", 250),
        (276, 120, 640, "Delete: not needed any more", 510),
    ):
        picture.line("arrow", (start, y), (end - 2 if end > start else end + 2, y))
        picture.text(where, y - 7, label, "small text-arrow")
    picture.text(392, 222, "from here on B may delete its own fork", "small", "start")
    picture.text(628, 298, "last fork gone: the value is freed", "small", "end")
    return picture


def life_of_a_call() -> Picture:
    picture = Picture(
        760,
        640,
        "The life of a call",
        "The caller's thread packs a call and writes it. A service thread of the callee reads it, runs the function and "
        "writes "
        "the reply. The caller's thread reads its own answer.",
    )
    picture.lane(10, 10, 320, 590, "caller", "the thread that calls")
    picture.lane(430, 10, 320, 590, "callee", "a service thread")
    picture.card(
        20,
        60,
        300,
        "1  Pack",
        [
            ("cluster/worker.py", "Worker.call"),
            ("rpc/client.py", "Client.start"),
            ("rpc/codec.py", "name, body, tensors"),
            ("rpc/interceptors.py", "notes of other layers"),
        ],
    )
    picture.card(
        20,
        184,
        300,
        "2  Write",
        [
            ("rpc/pending_calls.py", "enter the call"),
            ("wire/tensors.py, framing.py", "a frame"),
            ("transports/stream.py", "socket or memory"),
        ],
    )
    picture.card(
        440,
        230,
        300,
        "3  Read",
        [
            ("rpc/reader.py", "hold the connection"),
            ("wire/framing.py", "check, decode"),
            ("rpc/connection.py", "Request"),
        ],
    )
    picture.card(
        440,
        335,
        300,
        "4  Run",
        [
            ("rpc/server.py", "a slot"),
            ("rpc/codec.py", "find f, rebuild x"),
            ("your function", "f(x)"),
            ("rpc/codec.py", "pack the result"),
        ],
    )
    picture.card(
        440, 459, 300, "5  Reply", [("rpc/connection.py", "Reply or Failure"), ("transports/stream.py", "write")]
    )
    picture.card(
        20,
        459,
        300,
        "6  Take the answer",
        [
            ("rpc/reader.py", "read it in this thread"),
            ("rpc/connection.py", "leave the table"),
            ("rpc/codec.py", "rebuild the result"),
            ("rpc/client.py", "return or raise"),
        ],
    )
    picture.line("arrow", (324, 258), (436, 258))
    picture.text(380, 250, "Call", "strong text-arrow")
    picture.text(380, 276, "f, x, timeout", "small")
    picture.line("arrow", (436, 495), (324, 495))
    picture.text(380, 487, "Reply", "strong text-arrow")
    picture.text(380, 513, "or Failure", "small")
    picture.text(
        380,
        624,
        "The clock thread ends the call at its deadline; a lost connection ends it with WorkerLost.",
        "small",
    )
    return picture


PICTURES = {
    "recorded-messages": recorded_messages,
    "fast-and-smart": fast_and_smart,
    "pass-on-one-worker": pass_on_one_worker,
    "shortcut": shortcut,
    "fork-of-a-reference": fork_of_a_reference,
    "life-of-a-call": life_of_a_call,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(str(draw()))
