"""The page of a report: contents of files become text, never markup."""

import json
import random
from html.parser import HTMLParser

import numpy as np
import pytest

from mpigossip import config
from mpigossip.analysis import report
from mpigossip.store.log import Column, LogWriter
from tests.cases import every

pytestmark = pytest.mark.usefixtures("warm")

TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "p",
    "div",
    "table",
    "tr",
    "th",
    "td",
    "img",
    "br",
    "details",
    "summary",
    "pre",
}
ATTRIBUTES = {"lang", "charset", "name", "content", "class", "alt", "src", "open"}
MARKUP = [
    "<script src=//x>",
    "</pre><img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "</td>",
    "</title><script>",
    "<!--",
    "-->",
    "&lt;b&gt;",
    "&",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "$x^$",
    "' onclick='x",
    '" onmouseover="x',
    "]]>",
    "</style>",
    "<base href=//x>",
]


class Page(HTMLParser):
    """Parser that collects tags, attributes and texts of a page, as a browser would read them."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.texts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")


def hostile(draw):
    """Return a text of markup and letters."""
    parts = [draw.choice(MARKUP) for _ in range(draw.randrange(1, 4))]
    return "".join(parts + draw.choices("abc <>&/=", k=draw.randrange(5)))


def forged(folder, draw):
    """Create a run with markup in all texts of its log and findings; return these texts."""
    folder.mkdir(parents=True)
    texts = {
        name: hostile(draw)
        for name in (
            "digest",
            "checkpoint",
            "host",
            "key",
            "run",
            "text",
            "remedy",
            "level",
            "name",
        )
    }
    job = config.dump(config.load({"run": {"name": "a"}})).replace(
        'name = "a"', f"name = {json.dumps(texts['run'])}"
    )
    environment = {"host": texts["host"], texts["key"]: "x"}
    out = LogWriter(
        folder / "log.h5",
        nodes=1,
        job=job,
        columns={"loss": Column("nat", "loss")},
        environment=environment,
    )
    out.append({"loss": np.ones((3, 1))})
    out.evaluation({"step": 3, "loss": 0.5, "accuracy": 0.5})
    numbers = {name: 1 for name in ("steps", "nodes", "slots", "seconds", "bytes_sent")}
    summary = {"finished": 1, "digest": texts["digest"], "checkpoint": texts["checkpoint"]}
    out.summary(numbers | summary | {"accuracy": draw.choice([0.5, texts["text"]])})
    finding = {key: texts[key] for key in ("name", "text", "level", "remedy")}
    (folder / "doctor.json").write_text(json.dumps({"findings": [finding]}))
    return texts


@pytest.mark.parametrize("count", [50, every(300)])
def test_texts_of_forged_logs_are_not_markup(count, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_picture", lambda runs: "")  # a plot has no markup
    expected = None
    draw = random.Random(0)
    for number in range(count):
        run = tmp_path / str(number)
        texts = forged(run, draw)
        report.write([run], tmp_path / "page.html")
        page = Page((tmp_path / "page.html").read_text("utf-8"))
        assert set(page.tags) <= TAGS and {name for name, _ in page.attributes} <= ATTRIBUTES
        assert [value for name, value in page.attributes if name == "src"] == [
            "data:image/png;base64,"
        ]
        expected = expected or page.tags
        assert page.tags == expected, texts
        shown = "".join(page.texts)
        for name in set(texts) - {"run", "level", "digest"}:
            assert texts[name].strip() in shown, texts
        assert texts["digest"][:16] in shown and json.dumps(texts["run"]) in shown
        assert ("class", texts["level"]) in page.attributes
