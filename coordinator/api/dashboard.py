"""GET /: one page for people, made of the same API that everybody uses. It holds no data and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web
from attrs import frozen

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@frozen
class Page:
    """The page, and the policy that lets a browser run just what stands in it."""

    body: bytes
    policy: str

    async def get(self, request: web.Request) -> web.Response:
        headers = {
            "Content-Security-Policy": self.policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return web.Response(body=self.body, content_type="text/html", charset="utf-8", headers=headers)


def load_page() -> Page:
    text = resources.files("coordinator.api").joinpath("dashboard.html").read_text(encoding="utf-8")
    hashes = {kind: _hash(source) for kind, source in _INLINE.findall(text)}
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(text.encode(), policy)


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
