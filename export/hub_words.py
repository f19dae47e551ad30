"""What the service and its client say, made fit to be shown; and a token and an address, looked at before use."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
from pathlib import Path

from meki_edge.errors import UserError

ACCOUNT = "the token of your AI Hub account page"


def plain(text: str) -> str:
    """The client's message without JSON around it and without its box of lines."""
    with contextlib.suppress(ValueError, AttributeError):
        text = str(json.loads(text).get("detail", text))
    return " ".join("".join(" " if character in "│┌└─┐┘|" else character for character in text).split())


def redacted(text: str, token: str) -> str:
    """Without the token, and without the signatures of the storage's links, which let their holder in, too."""
    return re.sub(r"\?[\w-]+=[^\s'\")]*", "?[…]", text.replace(token, "[token]"))


def advice(message: str) -> str:
    """What to do about a refusal."""
    if any(word in message.lower() for word in ("quota", "limit", "minutes", "exceed")):
        return "wait until the quota allows more, or ask for a larger one on your AI Hub account page"
    return "mend what the service names, and run the same command again: nothing that is done is repeated"


def check_access(token: str, url: str, path: Path) -> None:
    """Look at a token (which is never shown) and the service's address before a request is made of them.

    Raises:
        UserError: no request could be made of them.
    """
    if not token.strip():
        raise UserError("the AI Hub token is empty", where=path, fix=f"run `meki-edge hub login` with {ACCOUNT}")
    if not re.fullmatch(r"[!-~]+", token):
        fix = f"run `meki-edge hub login` with {ACCOUNT}: letters, digits and signs, no spaces"
        raise UserError("the AI Hub token has a character that no token has", where=path, fix=fix)
    try:
        address = urllib.parse.urlsplit(url)
        good = address.scheme in ("http", "https") and address.hostname and (address.port or 1)
    except ValueError:  # a port that is no number, half an IPv6 address
        good = False
    if not good:
        fix = "write it as https://host, or run `meki-edge hub login` without --api-url for Qualcomm's own service"
        raise UserError(f"{url!r} is not the address of a service", where=f"{path}: api_url", fix=fix)
