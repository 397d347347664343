from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from autokernel.errors import UsageError
from autokernel.proposers.base import TaskState
from autokernel.proposers.edit import extract_edit
from autokernel.proposers.llm import MAX_FAILURES, LLMProposer, Spending, make_provider
from autokernel.proposers.playbook import PlaybookProposer, StarterProposer, backend_of
from autokernel.proposers.prompt import build_prompt
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.proposers.provider import ProviderError, Reply
from autokernel.proposers.providers import PROVIDERS, openai_compatible
from autokernel.records import Experiment, Port, Task
from autokernel.results import source_id

KERNEL = 'BACKEND = "torch"\n\n\ndef kernel_fn(x):\n    return x.relu()\n'


def make_task(folder: Path = Path()) -> Task:
    port = Port("x", (4, 8), "float16", (8, 1))
    weight = Port("w", (8,), "float16", (1,), role="parameter")
    return Task(
        rank=1,
        family="norm",
        fingerprint="f" * 32,
        device="cpu",
        call_count=25,
        module_paths=["h.0.ln_1"],
        inputs=[port, weight],
        outputs=[port],
        flops=1e6,
        bytes=2e6,
        roofline_us=3.5,
        dir=folder,
    )


def make_state(folder: Path = Path(), **changes) -> TaskState:
    return TaskState(task=make_task(folder), reference="class Model: ...", current=KERNEL, **changes)


# --- from reply to file ----------------------------------------------------------------------------------


def block(code: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{code}\n{fence}\n"


def test_a_good_reply() -> None:
    text = "**STRATEGY:** Split-K, fused epilogue\nDESCRIPTION: bound by latency: split K.\n" + block(KERNEL)
    edit = extract_edit(Reply(text))
    assert edit.source == KERNEL and not edit.problem
    assert edit.strategy == "split-k,fused-epilogue"
    assert edit.description == "bound by latency: split K"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(""), "empty"),
        (Reply(" \n\t"), "empty"),
        (Reply("I can't help with that.", finish="refused"), "refused: I can't help"),
        (Reply("Sorry, no."), "no python block"),
        (Reply("```python\n" + KERNEL), "cut off"),
        (Reply(block(KERNEL), finish="length"), "cut off"),
        (Reply(block("x = 1")), "no python block"),
        (Reply(block("void kernel_fn();", "cpp")), "no python block"),
        (Reply(block(KERNEL) + block(KERNEL + "# two")), "2 different files"),
        (Reply(block(KERNEL + "#" * 300_000)), "characters long"),
    ],
)
def test_replies_without_a_usable_file(reply: Reply, problem: str) -> None:
    edit = extract_edit(reply)
    assert edit.source is None and problem in edit.problem


def test_the_file_is_taken_whatever_the_fence() -> None:
    cpp = KERNEL + 'SOURCE = """\n```not a fence```\n"""\n'
    for text in (
        block(KERNEL, ""),
        block(KERNEL, "py", "~~~"),
        block(cpp, "python", "````"),
        "Plan:\n" + block("for (;;) {}", "cpp") + "Then:\n" + block(KERNEL),
        block(KERNEL) * 2,
        block(KERNEL).replace("\n", "\r\n"),
    ):
        edit = extract_edit(Reply(text))
        assert edit.source is not None and edit.source.startswith(KERNEL.rstrip()), edit.problem


# --- prompt ----------------------------------------------------------------------------------------------


def test_the_prompt_tells_what_matters() -> None:
    history = [
        Experiment(1, "t", "norm", status="baseline", backend="eager", latency_us=20.0),
        Experiment(
            2,
            "t",
            "norm",
            status="incorrect",
            candidate="a",
            strategy="split-k",
            description="split K",
            reason="7x e0",
        ),
        Experiment(3, "t", "norm", status="infra_error", candidate="b", reason="full disk"),
        Experiment(
            4, "t", "norm", status="discard", candidate="c", strategy="x", latency_us=9.0, proposer="tuner"
        ),
    ]
    state = make_state(
        history=history,
        baselines={"eager": 20.0, "compile": 10.0},
        current_latency_us=12.0,
        recall="- merge: positive",
    )
    system, user = build_prompt(state, "NVIDIA H200 (sm_90)")
    text = user["content"]
    for expected in (
        "NVIDIA H200", "called 25 time(s)", "float16[4, 8]", "parameter (static)", "compile: 10.00 µs",
        "current kernel.py: 12.00 µs (does not beat", "[split-k] split K -> incorrect: 7x e0", KERNEL.strip(),
        "class Model", "0.5 FLOPs per byte", "3.5 µs", "merge: positive",
    ):  # fmt: skip
        assert expected in text, expected
    assert "full disk" not in text, "an infra error says nothing about the kernel"
    assert text.count("->") == 1, "points of a search are not attempts of their own"
    assert "kernel_fn" in system["content"] and "prepack" in system["content"]
    assert build_prompt(state, "NVIDIA H200 (sm_90)") == [system, user], "pure"


# --- the LLM proposer, with recorded replies ---------------------------------------------------------------


def recording(path: Path, *entries: dict) -> str:
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return f"replay:{path}"


def test_replay_gives_proposals_with_their_tokens(tmp_path: Path) -> None:
    text = "STRATEGY: fuse\nDESCRIPTION: one pass\n" + block(KERNEL)
    llm = recording(tmp_path / "r.jsonl", {"text": text, "tokens_in": 100, "tokens_out": 20, "model": "m-1"})
    proposer = LLMProposer(make_provider(llm), device="cpu", record=tmp_path / "llm.jsonl")
    idea = proposer.propose(make_state())
    assert isinstance(idea, Proposal)
    assert (idea.source, idea.strategy, idea.description, idea.backend) == (
        KERNEL,
        "fuse",
        "one pass",
        "torch",
    )
    assert (idea.tokens_in, idea.tokens_out, idea.cost_usd, idea.model) == (100, 20, None, "m-1")
    assert proposer.propose(make_state()) is None, "the recording is at its end"
    # What was recorded can be replayed.
    again = LLMProposer(make_provider(f"replay:{tmp_path / 'llm.jsonl'}"), device="cpu").propose(make_state())
    assert isinstance(again, Proposal) and again.source == KERNEL and again.tokens_out == 20


def test_replay_matches_prompts(tmp_path: Path) -> None:
    llm = recording(
        tmp_path / "r.jsonl",
        {"text": "for attention", "match": "Family attention"},
        {"text": "for norm", "match": "Family norm"},
    )
    provider = make_provider(llm)
    messages = build_prompt(make_state(), "cpu")
    reply = provider.complete(messages)
    assert reply is not None and reply.text == "for norm"
    assert provider.complete(messages) is None


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"finish": "stop"}', '{"text": "x", "finish": "no"}'])
def test_a_bad_recording_is_a_usage_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "r.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1"):
        make_provider(f"replay:{tmp_path / 'r.jsonl'}")


def test_failures_are_values_and_end_by_themselves(tmp_path: Path) -> None:
    llm = recording(
        tmp_path / "r.jsonl", {"text": "no", "tokens_in": 5}, *[{"error": "boom"}] * (MAX_FAILURES + 2)
    )
    proposer = LLMProposer(make_provider(llm), device="cpu")
    first = proposer.propose(make_state())
    assert isinstance(first, Failure) and first.tokens_in == 5 and "no python block" in first.reason
    failures = [proposer.propose(make_state()) for _ in range(MAX_FAILURES)]
    assert all(isinstance(f, Failure) and "boom" in f.reason for f in failures)
    assert proposer.propose(make_state()) is None and "not asked any more" in proposer.dead


@pytest.mark.parametrize(
    ("spending", "why"),
    [
        (Spending(max_tokens=100, tokens=100), "--max-tokens 100"),
        (Spending(max_usd=1.0, usd=1.5), "--max-usd 1"),
        (Spending(max_usd=1.0, unpriced=True), "use --max-tokens"),
    ],
)
def test_limits_are_kept_before_asking(tmp_path: Path, spending: Spending, why: str) -> None:
    llm = recording(tmp_path / "r.jsonl", {"text": block(KERNEL)})
    proposer = LLMProposer(make_provider(llm), device="cpu", spending=spending)
    assert proposer.propose(make_state()) is None and why in proposer.dead


@pytest.mark.parametrize(
    ("text", "what"),
    [("nobody:x", "no provider 'nobody'"), ("openai", "openai:MODEL"), ("replay:", "FILE.jsonl"),
     ("replay:/no/such", "can't read")],
)  # fmt: skip
def test_bad_llm_flags(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        make_provider(text)


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_every_provider_can_be_created_or_says_why_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError) as caught:
        PROVIDERS[name].create("some-model", None)
    assert "\n" not in str(caught.value)


# --- the OpenAI provider, against a server in this process -----------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """``answers`` is a list of (status, body) that are given out in order; ``seen`` the requests."""
    state = SimpleNamespace(answers=[], seen=[], url="")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.seen.append((self.path, self.headers.get("Authorization"), body))
            status, answer = state.answers.pop(0)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    for variable in (
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(openai_compatible, "RETRIES", 0)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield state
    httpd.shutdown()
    httpd.server_close()


def completion(content: str | None, finish: str = "stop", **extra) -> dict:
    message = {"role": "assistant", "content": content, **extra}
    return {
        "id": "1", "object": "chat.completion", "created": 1, "model": "served-model",
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    }  # fmt: skip


def test_openai_reply(server: SimpleNamespace) -> None:
    server.answers = [(200, completion("hello")), (200, completion("cut", "length"))]
    provider = make_provider("openai:my-model", server.url)
    reply = provider.complete(build_prompt(make_state(), "cpu"))
    assert reply == Reply("hello", "stop", 11, 7, None, "served-model")
    path, _, body = server.seen[0]
    assert path == "/v1/chat/completions" and body["model"] == "my-model"
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    second = provider.complete([{"role": "user", "content": "x"}])
    assert second is not None and second.finish == "length"


def test_openai_refusal_and_odd_servers(server: SimpleNamespace) -> None:
    priced = completion("x")
    priced["usage"]["cost"] = 0.25
    bare = {"choices": [{"message": {"content": "y"}}]}
    server.answers = [
        (200, completion(None, refusal="I won't")),
        (200, completion("", "content_filter")),
        (200, priced),
        (200, bare),
        (200, {"choices": []}),
    ]
    provider = make_provider("openai:m", server.url)
    ask = [{"role": "user", "content": "x"}]
    replies = [provider.complete(ask) for _ in range(4)]  # type: ignore[arg-type]
    assert [r and r.finish for r in replies] == ["refused", "refused", "stop", "stop"]
    assert replies[0] and replies[0].text == "I won't"
    assert replies[2] and replies[2].cost_usd == 0.25
    assert replies[3] == Reply("y", "stop", None, None, None, "m")
    with pytest.raises(ProviderError, match="no message"):
        provider.complete(ask)  # type: ignore[arg-type]


@pytest.mark.parametrize(("status", "final"), [(401, True), (404, True), (429, False), (500, False)])
def test_openai_errors_become_failures(server: SimpleNamespace, status: int, final: bool) -> None:
    server.answers = [(status, {"error": {"message": "no\nway", "code": "x"}})]
    proposer = LLMProposer(make_provider("openai:m", server.url), device="cpu")
    failure = proposer.propose(make_state())
    assert isinstance(failure, Failure) and failure.final is final
    assert "no way" in failure.reason and "\n" not in failure.reason
    assert failure.proposer == "openai" and failure.model == "m"


def test_openai_unreachable(server: SimpleNamespace) -> None:
    provider = make_provider("openai:m", "http://127.0.0.1:9/v1")
    with pytest.raises(ProviderError, match="APIConnectionError"):
        provider.complete([{"role": "user", "content": "x"}])


def test_the_key_is_sent_and_never_recorded(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.answers = [(200, completion(block(KERNEL))), (401, {"error": {"message": "bad key"}})]
    proposer = LLMProposer(make_provider("openai:m", server.url), device="cpu", record=tmp_path / "llm.jsonl")
    assert isinstance(proposer.propose(make_state()), Proposal)
    assert isinstance(proposer.propose(make_state()), Failure)
    assert server.seen[0][1] == "Bearer sk-very-secret"
    assert "secret" not in (tmp_path / "llm.jsonl").read_text()


# --- starter and playbook --------------------------------------------------------------------------------


def test_the_starter_is_proposed_once_and_later_edits_by_hand(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    first = StarterProposer().propose(make_state(tmp_path))
    assert first is not None and first.strategy == "starter" and first.backend == "torch"
    tried = frozenset({source_id(KERNEL)})
    assert StarterProposer().propose(make_state(tmp_path, tried=tried)) is None
    (tmp_path / "kernel.py").write_text(KERNEL + "# mine\n")
    history = [Experiment(1, "t", "norm", status="discard", candidate=source_id(KERNEL))]
    edited = StarterProposer().propose(make_state(tmp_path, tried=tried, history=history))
    assert edited is not None and edited.strategy == "by-hand" and edited.source.endswith("# mine\n")


def strategy(name: str, families: tuple[str, ...], propose) -> SimpleNamespace:
    return SimpleNamespace(NAME=name, FAMILIES=families, propose=propose)


def test_the_playbook_asks_the_strategies_of_the_family_in_order() -> None:
    def give(*sources: str):
        return lambda ctx: [Proposal(s, "s", str(ctx), "torch") for s in sources]

    def fail(ctx: object) -> list[Proposal]:
        raise ValueError("oops")

    strategies = [
        strategy("one", ("norm", "rope"), give("a", "tried")),
        strategy("broken", ("norm",), fail),
        strategy("other", ("attention",), give("never")),
        strategy("all", ("*",), give("b")),
    ]
    playbook = PlaybookProposer(lambda task: "context", strategies)  # type: ignore[arg-type,return-value]
    state = make_state(tried=frozenset({source_id("tried")}))
    ideas = [playbook.propose(state) for _ in range(4)]
    assert isinstance(ideas[0], Proposal) and ideas[0].source == "a" and ideas[0].description == "context"
    assert isinstance(ideas[1], Failure) and "broken failed: ValueError: oops" in ideas[1].reason
    assert isinstance(ideas[2], Proposal) and ideas[2].source == "b"
    assert ideas[3] is None


def test_no_context_is_built_for_a_family_without_strategies() -> None:
    def never(task: Task):
        raise AssertionError("built")

    assert PlaybookProposer(never, [strategy("x", ("rope",), None)]).propose(make_state()) is None


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        (KERNEL, "torch"),
        ("BACKEND = 3", ""),
        ("def f(:", ""),
        ("x = 1", "torch"),
        ("x = 1\nBACKEND = 'cpp'", "cpp"),
    ],
)
def test_backend_of(source: str, backend: str) -> None:
    assert backend_of(source) == backend
