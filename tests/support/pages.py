"""Reading the HTML reports."""

import re
from html.parser import HTMLParser

VOID = {"meta", "line", "rect", "circle", "path", "br", "input"}


class Page(HTMLParser):
    """The tags and the text of a report; fails on tags that are not closed, and on anything loaded from elsewhere."""

    def __init__(self, html):
        super().__init__()
        self._open, self._parts, self.tags = [], [], []
        self.feed(html)
        assert self._open == []
        assert not {"link", "img", "iframe"} & {tag for tag, _ in self.tags}
        assert not any("src" in attributes for _, attributes in self.tags)
        assert not re.search(r"url\(|@import", html)
        self.text = re.sub(r"\s+", " ", " ".join(self._parts))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self._parts.append(data)

    def attributes(self, tag):
        """The attributes of all elements of a tag."""
        return [attributes for name, attributes in self.tags if name == tag]
