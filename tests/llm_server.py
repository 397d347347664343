"""A language model's API on 127.0.0.1 with scripted answers: both wire formats, streamed as by the real ones.

    with LLMServer() as server:
        server.answers = [openai_reply("hello"), refuse(429, "slow down", headers={"retry-after": "0.05"})]
        ...  # base URL: server.url
        server.seen[0].body, server.seen[0].headers

Answers are given out in order, one per request; when none is left the last one is given again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any


@dataclass
class Answer:
    """``chunks`` are sent one by one.  ``cut``: the connection is dropped after them, in the middle of the
    body.  ``pause_s`` is waited before the chunk of number ``pause_at`` and all after it."""

    chunks: Sequence[bytes]
    status: int = 200
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    pause_s: float = 0.0
    pause_at: int = 0


@dataclass
class Seen:
    """A request.  The names of headers are in small letters."""

    path: str
    headers: dict[str, str]
    body: Any


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests."""


class LLMServer:
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.seen: list[Seen] = []
        self._done = threading.Event()
        self._httpd = _Quiet(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}/v1"

    def __enter__(self) -> LLMServer:
        threading.Thread(target=self._httpd.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._httpd.shutdown()
        self._httpd.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.seen.append(Seen(self.path, headers, json.loads(body)))
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.content_type)
                self.send_header("Transfer-Encoding", "chunked")
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for number, chunk in enumerate(answer.chunks):
                        if answer.pause_s and number >= answer.pause_at:
                            server._done.wait(answer.pause_s)
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                        self.wfile.flush()
                    if answer.cut:
                        self.close_connection = True
                        return
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    self.close_connection = True  # the client has hung up

            def log_message(self, format: str, *args: object) -> None: ...

        return Handler


def sse(data: Any, event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{head}data: {text}\n\n".encode()


def refuse(status: int, message: str, *, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    """An error as both APIs send it; ``fields`` go beside the message (type, code, param)."""
    error = {"message": message, "type": "invalid_request_error", **fields}
    body = json.dumps({"type": "error", "error": error}).encode()
    return Answer([body], status, "application/json", headers or {})


def page(status: int = 200, title: str = "Sign in") -> Answer:
    """What a proxy or a wrong address answers."""
    return Answer([f"<!DOCTYPE html><html><title>{title}</title></html>".encode()], status, "text/html")


def plain_json(data: Any) -> Answer:
    return Answer([json.dumps(data).encode()], 200, "application/json")


# --- OpenAI's chat completions ----------------------------------------------------------------------------


def openai_chunk(delta: Mapping[str, Any] | None, finish: str | None = None) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": dict(delta), "finish_reason": finish}]
    return sse(
        {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "served", "choices": choices}
    )


def openai_usage(**usage: Any) -> bytes:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18, **usage}
    return sse({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "served", "choices": [],
                "usage": usage})  # fmt: skip


OPENAI_DONE = sse("[DONE]")


def openai_reply(
    text: str, finish: str = "stop", *, usage: Mapping[str, Any] | None = MappingProxyType({}), **changes: Any
) -> Answer:
    """A whole streamed answer, a few letters at a time; ``usage`` None leaves the usage out."""
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    chunks = [openai_chunk({"role": "assistant", "content": ""})]
    chunks += [openai_chunk({"content": piece}) for piece in pieces]
    chunks.append(openai_chunk({}, finish))
    if usage is not None:
        chunks.append(openai_usage(**usage))
    return Answer([*chunks, OPENAI_DONE], **changes)


# --- Anthropic's messages ---------------------------------------------------------------------------------


def anthropic_start(**usage: Any) -> bytes:
    usage = {"input_tokens": 11, "output_tokens": 1, **usage}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "served", "content": [],
               "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    return sse({"type": "message_start", "message": message}, "message_start")


def anthropic_block(index: int, block: Mapping[str, Any], *deltas: Mapping[str, Any]) -> list[bytes]:
    events = [("content_block_start", {"index": index, "content_block": dict(block)})]
    events += [("content_block_delta", {"index": index, "delta": dict(delta)}) for delta in deltas]
    events.append(("content_block_stop", {"index": index}))
    return [sse({"type": name, **data}, name) for name, data in events]


def anthropic_text(index: int, text: str) -> list[bytes]:
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
    return anthropic_block(index, {"type": "text", "text": ""}, *deltas)


def anthropic_end(stop: str = "end_turn", output_tokens: int | None = 7) -> list[bytes]:
    delta = {"stop_reason": stop, "stop_sequence": None}
    usage = {} if output_tokens is None else {"output_tokens": output_tokens}
    return [
        sse({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta"),
        sse({"type": "message_stop"}, "message_stop"),
    ]


def anthropic_reply(text: str, stop: str = "end_turn", **changes: Any) -> Answer:
    ping = sse({"type": "ping"}, "ping")
    return Answer([anthropic_start(), ping, *anthropic_text(0, text), *anthropic_end(stop)], **changes)


def reply(provider: str, text: str, **changes: Any) -> Answer:
    """A good answer in the wire format of ``provider``."""
    return (anthropic_reply if provider == "anthropic" else openai_reply)(text, **changes)
