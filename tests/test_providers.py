"""The providers through the real SDKs, against a local server: what comes back, or which error and line."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autokernel.errors import UsageError
from autokernel.proposers.prices import Price
from autokernel.proposers.provider import Provider, ProviderError, Reply, Request
from autokernel.proposers.providers import PROVIDERS
from autokernel.proposers.providers._clock import Patience, _retry_after_s
from autokernel.proposers.providers._errors import kind_of
from tests.llm_server import (
    OPENAI_DONE,
    Answer,
    LLMServer,
    anthropic_block,
    anthropic_end,
    anthropic_reply,
    anthropic_start,
    anthropic_text,
    openai_chunk,
    openai_reply,
    openai_usage,
    page,
    plain_json,
    refuse,
    reply,
    sse,
)

KEY = "sk-test-0123456789abcdef"
BOTH = pytest.mark.parametrize("api", ["anthropic", "openai"])
QUICK = Patience(connect_s=1.0, chunk_s=5.0, total_s=10.0, retries=2, max_wait_s=1.0, pause_s=0.0)
SOON = {"retry-after-ms": "10"}
ASK = Request("the rules", "the task", [{"role": "user", "content": "go"}], 500)

Make = Callable[..., Provider]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "ANTHROPIC_LOG", "OPENAI_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def server() -> Iterator[LLMServer]:
    with LLMServer() as started:
        yield started


@pytest.fixture
def make(server: LLMServer) -> Make:
    def build(api: str, **settings) -> Provider:
        return PROVIDERS[api].create("my-model", server.url, **{"patience": QUICK, **settings})

    return build


def answer(provider: Provider, request: Request = ASK) -> Reply:
    found = provider.complete(request)
    assert found is not None
    return found


def failure(provider: Provider, request: Request = ASK) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        provider.complete(request)
    error = caught.value
    assert "\n" not in str(error) and KEY not in str(error)
    assert error.__suppress_context__ or error.__context__ is None, "a traceback would show the SDK's own"
    return error


# --- answers ----------------------------------------------------------------------------------------------


@BOTH
def test_a_streamed_answer(server: LLMServer, make: Make, api: str) -> None:
    server.answers = [reply(api, "hello, здравствуйте 你好")]
    assert answer(make(api)) == Reply(
        "hello, здравствуйте 你好", "stop", 11, 7, 0 if api == "anthropic" else None, None, "served"
    )
    seen = server.seen[0]
    assert seen.path == ("/v1/messages" if api == "anthropic" else "/v1/chat/completions")
    assert seen.body["model"] == "my-model" and seen.body["stream"] is True
    assert KEY in seen.headers["authorization"]


def test_what_anthropic_is_sent(server: LLMServer, make: Make) -> None:
    """Constant parts first, each with a cache mark, and nothing that changes before one."""
    server.answers = [anthropic_reply("x")]
    turns = [("user", "go"), ("assistant", "no"), ("user", "again")]
    answer(make("anthropic"), Request("sys", "task", [{"role": r, "content": c} for r, c in turns], 500))  # type: ignore[typeddict-item]
    body = server.seen[0].body
    mark = {"type": "ephemeral"}
    assert body["system"] == [{"type": "text", "text": "sys", "cache_control": mark}]
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "task", "cache_control": mark},
        {"type": "text", "text": "go"},
    ]
    assert body["max_tokens"] == 500 and body["thinking"] == {"type": "adaptive"}
    assert "output_config" not in body


def test_what_openai_is_sent(server: LLMServer, make: Make) -> None:
    server.answers = [openai_reply("x")]
    answer(make("openai"))
    body = server.seen[0].body
    assert body["messages"] == [
        {"role": "system", "content": "the rules"},
        {"role": "user", "content": "the task\n\ngo"},
    ]
    assert body["max_tokens"] == 500 and "max_completion_tokens" not in body
    assert body["stream_options"] == {"include_usage": True} and "reasoning_effort" not in body


def test_the_real_openai_api_is_sent_the_new_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request: what would be sent to api.openai.com, and that it is never sent without a limit."""
    provider = PROVIDERS["openai"].create("gpt-x")
    sent = []
    monkeypatch.setattr(provider._client.chat.completions, "create", lambda **options: sent.append(options))
    provider._open(ASK)
    assert sent[0]["max_completion_tokens"] == 500 and "max_tokens" not in sent[0]
    assert provider._drop("unsupported parameter: 'max_completion_tokens'")
    assert not provider._drop("unsupported parameter: 'max_tokens'")


@BOTH
def test_effort(server: LLMServer, make: Make, api: str) -> None:
    server.answers = [reply(api, "x")]
    answer(make(api, effort="high"))
    body = server.seen[0].body
    assert (body["output_config"]["effort"] if api == "anthropic" else body["reasoning_effort"]) == "high"


@BOTH
def test_a_truncated_and_a_refused_answer(server: LLMServer, make: Make, api: str) -> None:
    if api == "anthropic":
        server.answers = [
            anthropic_reply("cut", "max_tokens"),
            anthropic_reply("cut", "model_context_window_exceeded"),
            anthropic_reply("I won't", "refusal"),
        ]
    else:
        refusal = [
            openai_chunk({"refusal": "I "}),
            openai_chunk({"refusal": "won't"}),
            openai_chunk({}, "stop"),
        ]
        server.answers = [
            openai_reply("cut", "length"),
            openai_reply("", "content_filter"),
            Answer([*refusal, OPENAI_DONE]),
        ]
    finishes = [answer(make(api)) for _ in range(3)]
    expected = ["length", "length", "refused"] if api == "anthropic" else ["length", "refused", "refused"]
    assert [r.finish for r in finishes] == expected
    assert finishes[2].text == "I won't"


def test_anthropic_thinking_and_unknown_blocks_are_no_text(server: LLMServer, make: Make) -> None:
    blocks = [
        *anthropic_block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "BACKEND = wrong"},
            {"type": "signature_delta", "signature": "abc"},
        ),
        *anthropic_block(1, {"type": "redacted_thinking", "data": "xyz"}),
        *anthropic_block(2, {"type": "hologram", "light": 1}, {"type": "hologram_delta", "text": "no"}),
        *anthropic_block(
            3,
            {"type": "tool_use", "id": "t", "name": "f", "input": {}},
            {"type": "input_json_delta", "partial_json": "{}"},
        ),
        *anthropic_text(4, "one "),
        *anthropic_text(5, "two"),
        sse({"type": "news", "news": 1}, "news"),
    ]
    server.answers = [Answer([anthropic_start(), *blocks, *anthropic_end()])]
    assert answer(make("anthropic")).text == "one two"


@pytest.mark.parametrize(
    "deltas",
    [
        [{"reasoning_content": "BACKEND = wrong"}, {"content": "text"}],
        [{"reasoning": "wrong", "content": None}, {"content": "text"}],
        [{"content": "<think>wrong"}, {"content": "</think>\n\n"}, {"content": "text"}],
        [{"content": "text", "tool_calls": []}],
        [
            {"content": "te"},
            {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f"}}]},
            {"content": "xt"},
        ],
    ],
)
def test_openai_reasoning_and_tool_calls_are_no_text(server: LLMServer, make: Make, deltas: list) -> None:
    server.answers = [
        Answer([*map(openai_chunk, deltas), openai_chunk({}, "stop"), openai_usage(), OPENAI_DONE])
    ]
    assert answer(make("openai")).text == "text"


# --- tokens and dollars -----------------------------------------------------------------------------------


def test_anthropic_counts_cached_and_written_tokens(server: LLMServer, make: Make) -> None:
    start = anthropic_start(input_tokens=100, cache_read_input_tokens=1000, cache_creation_input_tokens=10)
    server.answers = [Answer([start, *anthropic_text(0, "x"), *anthropic_end(output_tokens=20)])]
    found = answer(make("anthropic", price=Price(1.0, 10.0, 0.1, 2.0)))
    assert (found.tokens_in, found.tokens_cached, found.tokens_out) == (1110, 1000, 20)
    assert found.cost_usd == pytest.approx((100 * 1 + 1000 * 0.1 + 10 * 2 + 20 * 10) / 1e6)


def test_openai_counts_cached_tokens_and_its_own_cost_wins(server: LLMServer, make: Make) -> None:
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 600}, "completion_tokens": 20}
    server.answers = [openai_reply("x", usage=usage), openai_reply("x", usage={**usage, "cost": 0.25})]
    provider = make("openai", price=Price(1.0, 10.0, 0.1))
    listed, reported = answer(provider), answer(provider)
    assert (listed.tokens_in, listed.tokens_cached, listed.tokens_out) == (1000, 600, 20)
    assert listed.cost_usd == pytest.approx((400 * 1 + 600 * 0.1 + 20 * 10) / 1e6)
    assert reported.cost_usd == 0.25


@BOTH
def test_missing_usage_is_estimated_from_above(server: LLMServer, make: Make, api: str) -> None:
    """None would count as nothing against a limit."""
    if api == "anthropic":
        start = anthropic_start(input_tokens=None, output_tokens=None)
        server.answers = [Answer([start, *anthropic_text(0, "x" * 40), *anthropic_end(output_tokens=None)])]
    else:
        server.answers = [openai_reply("x" * 40, usage=None)]
    found = answer(make(api, price=Price(1.0, 1.0)))
    assert found.estimated and found.text == "x" * 40
    assert (found.tokens_in or 0) >= len("the rules" + "the task" + "go") and found.tokens_out == 40
    assert found.cost_usd is not None and found.cost_usd > 0


def test_a_server_that_ignores_the_limit_is_not_listened_to_for_ever(server: LLMServer, make: Make) -> None:
    endless = [openai_chunk({"content": "x" * 100})] * 2000
    server.answers = [Answer(endless)]
    found = answer(make("openai"))
    assert found.finish == "length" and len(found.text) < 30_000


# --- parameters that a server doesn't take ----------------------------------------------------------------


def test_openai_parameters_that_are_refused_are_left_out(
    server: LLMServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers = [
        refuse(400, "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'."),
        refuse(400, "stream_options: extra fields not permitted"),
        refuse(422, "Unknown field reasoning_effort"),
        openai_reply("ok"),
    ]
    provider = make("openai", effort="high")
    assert answer(provider).text == "ok"
    last = server.seen[-1].body
    assert last["max_completion_tokens"] == 500
    assert not {"max_tokens", "stream_options", "reasoning_effort"} & set(last)
    assert "takes no effort" in caplog.text, "what was asked for and can't be had is said"
    answer(provider)
    assert len(server.seen) == 5, "and it is remembered"


def test_anthropic_thinking_falls_back_to_a_budget_and_then_to_none(server: LLMServer, make: Make) -> None:
    ask = Request("s", "t", ASK.turns, 8000)
    server.answers = [
        refuse(400, "adaptive thinking is not supported on this model"),
        refuse(400, "thinking is not supported on this model"),
        anthropic_reply("ok"),
    ]
    assert answer(make("anthropic"), ask).text == "ok"
    thinking = [seen.body.get("thinking") for seen in server.seen]
    assert thinking == [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 4000}, None]


@pytest.mark.parametrize(
    ("api", "message", "limit"),
    [
        (
            "anthropic",
            "max_tokens: 500 > 100, which is the maximum allowed number of output tokens for x",
            100,
        ),
        ("openai", "max_tokens is too large: 500. This model supports at most 100 completion tokens", 100),
        ("openai", "Invalid max_tokens value, the valid range of max_tokens is [1, 100]", 100),
    ],
)
def test_the_models_own_limit_is_taken(
    server: LLMServer, make: Make, api: str, message: str, limit: int
) -> None:
    server.answers = [refuse(400, message), reply(api, "ok")]
    provider = make(api)
    assert answer(provider).text == answer(provider).text == "ok"
    assert [seen.body["max_tokens"] for seen in server.seen] == [500, limit, limit]


def test_what_the_context_leaves_is_taken_for_one_request(server: LLMServer, make: Make) -> None:
    text = (
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is "
        "4096 tokens and your request has 1000 input tokens (9000 > 4096 - 1000)"
    )
    server.answers = [refuse(400, text), openai_reply("ok")]
    provider, ask = make("openai"), Request("s", "t", ASK.turns, 9000)
    answer(provider, ask)
    answer(provider, ask)
    assert [seen.body["max_tokens"] for seen in server.seen] == [9000, 3096, 9000]


@BOTH
def test_a_refusal_that_stays_is_an_error(server: LLMServer, make: Make, api: str) -> None:
    server.answers = [refuse(400, "max_tokens and thinking and effort are all wrong")]
    error = failure(make(api, effort="high"))
    assert error.kind == "other" and not error.final and "all wrong" in str(error)
    assert len(server.seen) <= 5


# --- refusals ---------------------------------------------------------------------------------------------


OVERFLOWS = {
    "openai": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.",
    "openai new": "Your input exceeds the context window of this model. Please adjust your input.",
    "openai tier": "Request too large for gpt-x on tokens per min (TPM): Limit 30000, Requested 40000.",
    "anthropic": "prompt is too long: 210000 tokens > 200000 maximum",
    "anthropic reply": "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "vllm": "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "vllm room": "This model's maximum context length is 4096 tokens and your request has 4000 input tokens",
    "ollama": "the input length exceeds the context length",
    "llama.cpp": "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "lm studio": "Trying to keep the first 5000 tokens when context the overflows. However, the model is "
    "loaded with context length of only 4096 tokens, which is not enough.",
    "lm studio 2": "The number of tokens to keep from the initial prompt is greater than the context length.",
}


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_an_overflow_in_every_wording(server: LLMServer, make: Make, wording: str) -> None:
    server.answers = [refuse(400, OVERFLOWS[wording])]
    error = failure(make("anthropic" if "anthropic" in wording else "openai"))
    assert error.kind == "overflow" and not error.final
    assert str(error).startswith("the prompt is too long for my-model (400): ") and len(server.seen) == 1


def test_an_overflow_by_code_or_size_or_in_the_stream(server: LLMServer, make: Make) -> None:
    in_stream = Answer([sse({"error": {"message": "x", "code": "context_length_exceeded"}})])
    server.answers = [refuse(400, "no", code="context_length_exceeded"), page(413), in_stream]
    assert [failure(make("openai")).kind for _ in range(3)] == ["overflow"] * 3


REFUSALS = [
    (401, "invalid x-api-key", {}, "auth", "refuses the key (401), see {variable}: invalid x-api-key"),
    (403, "not allowed", {}, "auth", "refuses the key (403)"),
    (404, "model: my-model", {"type": "not_found_error"}, "model", "doesn't know my-model"),
    (400, "The model `my-model` does not exist", {}, "model", "doesn't know my-model"),
    (400, "Your credit balance is too low to access the API.", {}, "quota", "credit at http"),
    (402, "Insufficient Balance", {}, "quota", "credit at http"),
    (400, "temperature is wrong", {}, "other", "refuses the request (400): temperature is wrong"),
]


@BOTH
@pytest.mark.parametrize(("status", "message", "fields", "kind", "line"), REFUSALS)
def test_refusals_that_are_not_repeated(
    server: LLMServer, make: Make, api: str, status: int, message: str, fields: dict, kind: str, line: str
) -> None:
    server.answers = [refuse(status, message, **fields)]
    error = failure(make(api))
    assert error.kind == kind and error.final == (kind in ("auth", "model")) and len(server.seen) == 1
    variable = "ANTHROPIC_API_KEY" if api == "anthropic" else "OPENAI_API_KEY"
    assert line.format(variable=variable) in str(error)


@BOTH
@pytest.mark.parametrize(
    ("status", "fields", "kind"),
    [
        (429, {"type": "rate_limit_error"}, "rate"),
        (429, {"code": "insufficient_quota"}, "quota"),
        (500, {"type": "api_error"}, "server"),
        (503, {}, "server"),
        (529, {"type": "overloaded_error"}, "server"),
    ],
)
def test_refusals_that_are_repeated_and_stay(
    server: LLMServer, make: Make, api: str, status: int, fields: dict, kind: str
) -> None:
    server.answers = [refuse(status, "not\nnow", headers=SOON, **fields)]
    error = failure(make(api))
    assert error.kind == kind and not error.final and "not now" in str(error)
    assert len(server.seen) == 1 + QUICK.retries


@BOTH
@pytest.mark.parametrize("status", [429, 500, 529])
def test_refusals_that_are_repeated_and_pass(server: LLMServer, make: Make, api: str, status: int) -> None:
    server.answers = [refuse(status, "wait", headers={"retry-after": "0.2"}), reply(api, "ok")]
    start = time.monotonic()
    assert answer(make(api)).text == "ok"
    assert 0.2 <= time.monotonic() - start < 2.0 and len(server.seen) == 2


@BOTH
@pytest.mark.parametrize("wait", ["3600", "99999999999", "Fri, 31 Dec 2199 23:59:59 GMT"])
def test_a_long_retry_after_is_not_waited_for(server: LLMServer, make: Make, api: str, wait: str) -> None:
    server.answers = [refuse(429, "come back later", headers={"retry-after": wait})]
    start = time.monotonic()
    error = failure(make(api))
    assert error.kind == "rate" and len(server.seen) == 1 and time.monotonic() - start < 2.0


def test_retry_after_is_read_as_the_sdks_do() -> None:
    assert _retry_after_s({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert _retry_after_s({"retry-after": "nonsense"}) == 0.0 == _retry_after_s({})


def test_kinds_of_odd_wordings() -> None:
    assert kind_of(404, 'model "x" not found, try pulling it first') == "model"
    assert kind_of(400, "No models loaded. Please load a model in the developer page") == "model"
    assert kind_of(404, "404 page not found: /billing/v1/chat") == "model"
    assert kind_of(407, "proxy login") == "connection"
    assert kind_of(None, "overloaded_error Overloaded") == "server"
    assert kind_of(400, "<html>no</html>") == "bad_answer"


# --- connections ------------------------------------------------------------------------------------------


def half(api: str, **changes) -> Answer:
    """The first half of an answer."""
    if api == "anthropic":
        return Answer([anthropic_start(), *anthropic_text(0, "half an answ")[:-1]], **changes)
    return Answer([openai_chunk({"content": "half an answ"})], **changes)


@BOTH
@pytest.mark.parametrize("cut", [True, False])
def test_an_answer_that_breaks_off_is_asked_for_once_more(
    server: LLMServer, make: Make, api: str, cut: bool
) -> None:
    """Whether the connection is reset or closed in good order; the lost half is counted."""
    server.answers = [half(api, cut=cut), reply(api, "whole")]
    found = answer(make(api, price=Price(1.0, 1.0)))
    assert found.text == "whole" and len(server.seen) == 2 and found.estimated
    assert (found.tokens_in or 0) >= 22 and (found.tokens_out or 0) == 7 + len("half an answ")
    assert found.cost_usd == pytest.approx(((found.tokens_in or 0) + (found.tokens_out or 0)) / 1e6)


@BOTH
def test_an_answer_that_breaks_off_twice_is_an_error(server: LLMServer, make: Make, api: str) -> None:
    server.answers = [half(api, cut=True)]
    error = failure(make(api, price=Price(1.0, 1.0)))
    assert error.kind == "connection" and not error.final and len(server.seen) == 2
    assert server.url in str(error) and "broke off" in str(error)
    assert error.lost is not None and error.lost.tokens_out == 2 * len("half an answ")


@BOTH
def test_no_second_time_where_the_limits_forbid_it(server: LLMServer, make: Make, api: str) -> None:
    asked = []
    server.answers = [half(api, cut=True)]
    failure(make(api, may_repeat=lambda request, lost: asked.append((request, lost.tokens_out))))
    assert asked == [(ASK, len("half an answ"))] and len(server.seen) == 1


@BOTH
def test_an_error_in_the_middle_of_the_stream(server: LLMServer, make: Make, api: str) -> None:
    error = {"type": "overloaded_error", "message": "Overloaded"}
    event = sse({"type": "error", "error": error}, "error")
    broken = Answer([*half(api).chunks, event])
    server.answers = [broken, reply(api, "ok")]
    assert answer(make(api)).text == "ok"
    server.answers = [broken]
    found = failure(make(api))
    assert found.kind == "server" and "Overloaded" in str(found) and found.lost is not None


@BOTH
def test_a_slow_answer(server: LLMServer, make: Make, api: str) -> None:
    slow = half(api)
    slow.chunks, slow.pause_s, slow.pause_at = [*slow.chunks, b": \n\n"], 5.0, len(slow.chunks)
    server.answers = [slow]
    start = time.monotonic()
    error = failure(make(api, patience=Patience(chunk_s=0.3, pause_s=0.0)))
    assert (
        error.kind == "connection" and "too slow: nothing for 0.3 s" in str(error) and error.lost is not None
    )
    assert time.monotonic() - start < 3.0 and len(server.seen) == 1, "the second time would be no faster"


@BOTH
def test_an_answer_may_take_longer_than_the_time_between_chunks(
    server: LLMServer, make: Make, api: str
) -> None:
    server.answers = [reply(api, "a long answer", pause_s=0.1)]
    start = time.monotonic()
    assert answer(make(api, patience=Patience(chunk_s=0.4))).text == "a long answer"
    assert time.monotonic() - start > 0.4


@BOTH
def test_signs_of_life_for_ever(server: LLMServer, make: Make, api: str) -> None:
    alive = Answer([*half(api).chunks, *[b": still here\n\n"] * 100], pause_s=0.05)
    server.answers = [alive]
    error = failure(make(api, patience=Patience(chunk_s=5.0, total_s=0.4)))
    assert error.kind == "connection" and "no whole answer in 0.4 s" in str(error)


@BOTH
def test_a_server_that_never_answers_costs_one_wait(make: Make, api: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        provider = PROVIDERS[api].create(
            "m", f"http://127.0.0.1:{silent.getsockname()[1]}/v1", patience=Patience(chunk_s=0.3, retries=1)
        )
        start = time.monotonic()
        error = failure(provider)
    assert error.kind == "connection" and "too slow" in str(error) and time.monotonic() - start < 2.5


@BOTH
def test_an_unreachable_address_is_named(api: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    error = failure(PROVIDERS[api].create("m", url, patience=Patience(retries=0)))
    assert error.kind == "connection" and not error.final
    assert f"can't reach {url} (" in str(error) and "is a server running there?" in str(error)


@BOTH
def test_a_dead_proxy_is_named(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@127.0.0.1:{port}")
    error = failure(PROVIDERS[api].create("m", patience=Patience(retries=0)))
    assert (
        error.kind == "connection"
        and f"@127.0.0.1:{port}" in str(error)
        and "through the proxy" in str(error)
    )
    assert "secret" not in str(error)


@BOTH
def test_a_proxy_that_refuses(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def refuse_one() -> None:
            connection, _ = proxy.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        threading.Thread(target=refuse_one, daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        error = failure(PROVIDERS[api].create("m", patience=Patience(retries=0)))
    assert error.kind == "connection" and "407" in str(error) and "through the proxy" in str(error)


@BOTH
@pytest.mark.parametrize("proxy", ["nonsense://x", "http://[::1"])
def test_a_proxy_variable_that_is_none(api: str, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(UsageError, match="proxy of the environment"):
        PROVIDERS[api].create("m")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x/v1", "http://", "http://a b/v1", "http://x:99999/v1"]
)
def test_a_base_url_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match=r"--base-url .* is no address: write http://HOST:PORT/v1"):
        PROVIDERS["openai"].create("m", url)


# --- answers that are none --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "broken",
    [
        page(),
        Answer([sse("{not json")]),
        Answer([]),
        Answer([b"\xff\xfe\x00 binary \x80\n\n"]),
        Answer([b"data: \xff\xfe\n\n"]),
        Answer([b"hello?"], content_type="text/plain"),
        Answer([b"{not json"], content_type="application/json"),
        plain_json({"choices": []}),
        plain_json([]),
        Answer([sse("[]"), sse("5"), sse('"x"'), sse("null")]),
        Answer([sse({"choices": "x"}), sse({"choices": [None]}), sse({"choices": [{"delta": 5}]})]),
    ],
    ids=[
        "page",
        "broken json",
        "nothing",
        "binary",
        "binary data",
        "text",
        "broken whole",
        "no choices",
        "list",
        "no objects",
        "odd choices",
    ],
)
def test_an_answer_that_is_not_the_apis(server: LLMServer, make: Make, api: str, broken: Answer) -> None:
    server.answers = [broken]
    error = failure(make(api))
    assert error.kind == "bad_answer" and not error.final and len(server.seen) == 1
    assert server.url in str(error)


@BOTH
def test_broken_json_in_the_middle(server: LLMServer, make: Make, api: str) -> None:
    event = "content_block_delta" if api == "anthropic" else None
    server.answers = [Answer([*half(api).chunks, sse('{"broken', event)])]
    error = failure(make(api))
    assert error.kind == "bad_answer" and "no valid JSON" in str(error) and error.lost is not None


@BOTH
def test_the_page_of_a_proxy(server: LLMServer, make: Make, api: str) -> None:
    server.answers = [page(200), page(502, "Bad Gateway")]
    assert "sent a web page (text/html): is that the API, and is a proxy in between?" in str(
        failure(make(api))
    )
    error = failure(make(api, patience=Patience(retries=0)))
    assert error.kind == "server" and "(502): a web page, “Bad Gateway”" in str(error)


def test_openai_empty_choices(server: LLMServer, make: Make) -> None:
    server.answers = [Answer([openai_chunk(None), openai_usage(), OPENAI_DONE])]
    error = failure(make("openai"))
    assert error.kind == "bad_answer" and "no message" in str(error)


def test_openai_servers_that_do_not_stream(server: LLMServer, make: Make) -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}],
    }
    whole = {"choices": [{"message": message, "finish_reason": "length"}], "usage": {"prompt_tokens": 3}}
    server.answers = [plain_json(whole), plain_json({"error": {"message": "model 'x' not found"}})]
    found = answer(make("openai"))
    assert (found.text, found.finish, found.tokens_in, found.model) == ("hello", "length", 3, "my-model")
    error = failure(make("openai"))
    assert error.kind == "model" and "model 'x' not found" in str(error)


# --- keys -------------------------------------------------------------------------------------------------


@BOTH
def test_no_key_is_one_line_before_anything_is_sent(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"{api.upper()}_API_KEY"
    monkeypatch.delenv(variable)
    with pytest.raises(UsageError, match=f"no API key: set {variable}"):
        PROVIDERS[api].create("m")


@BOTH
def test_a_local_server_needs_none(
    server: LLMServer, make: Make, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(f"{api.upper()}_API_KEY")
    server.answers = [reply(api, "ok")]
    assert answer(make(api)).text == "ok" and KEY not in str(server.seen[0].headers)


@BOTH
def test_no_log_holds_the_key(
    server: LLMServer, make: Make, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All that the SDK and its HTTP client log at the lowest level, and an error that quotes the key."""
    names = ("", "openai", "anthropic", "httpx2", "httpcore2", "httpx", "httpcore")
    for name in names:
        caplog.set_level(logging.DEBUG, logger=name)
    server.answers = [
        refuse(500, "x", headers=SOON),
        refuse(401, f"Incorrect API key provided: {KEY}; you sent Bearer {KEY}"),
    ]
    error = failure(make(api))
    assert "[redacted]" in str(error)
    assert len(caplog.records) > 5, "it does log"
    logged = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert KEY not in logged
