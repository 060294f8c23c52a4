"""A server of requests: it takes any model that reads chunks and takes steps over paged caches (server.py says how)."""

from .pages import Pages
from .request import Request, TooLong, checked_tokens, integer, option
from .server import Server

__all__ = ["Pages", "Request", "Server", "TooLong", "checked_tokens", "integer", "option"]
