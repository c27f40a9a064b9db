"""The timeline page: lanes, messages, memory and idle time of one or more timelines, in one self-contained HTML document.

    payload.py   a timeline as compact JSON
    page.py      timelines as a page: ``render_page``, ``write_page``
    server.py    the same page, served with live controls: ``ViewServer``, ``serve``
    static/      the page itself: HTML, CSS and plain ES modules, drawn on a Canvas; no build step, no network

Nothing is imported here, so that ``import wavetrain.view`` costs nothing.
"""
