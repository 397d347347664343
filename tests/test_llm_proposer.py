"""A language model as a proposer: rounds, repairs, reflections, limits and what a kill leaves behind.

The provider is scripted; the wire is tested in test_providers.py, parsing in test_edit.py, prompts in
test_prompt.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_proposers import KERNEL, block, make_state

from autokernel.errors import UsageError
from autokernel.proposers.asking import MAX_PAUSED_S, PAUSES_S
from autokernel.proposers.base import TaskState
from autokernel.proposers.choice import make_provider
from autokernel.proposers.llm import LLMProposer
from autokernel.proposers.prompt import MAX_TRIM
from autokernel.proposers.proposal import Failure, Proposal
from autokernel.proposers.provider import ProviderError, Reply, Request
from autokernel.proposers.providers import PROVIDERS
from autokernel.proposers.reflection import REFLECT
from autokernel.proposers.spending import Spending
from autokernel.records import Experiment
from autokernel.results import source_id, store_source

FASTER = KERNEL.replace("x.relu()", "x.clamp_min(0)")
ANSWER = "STRATEGY: fuse\nMECHANISM: one pass\n" + block(FASTER)


def reply(text: str, **changes) -> Reply:
    values = {"tokens_in": 100, "tokens_out": 20, "cost_usd": 0.01, "model": "m-1"} | changes
    return Reply(text, **values)


class Scripted:
    """Gives ``answers`` out in order; an exception is raised."""

    name, model = "scripted", "m"

    def __init__(self, *answers: Reply | ProviderError | None) -> None:
        self.answers, self.asked = list(answers), list[Request]()

    def complete(self, request: Request) -> Reply | None:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, ProviderError):
            raise answer
        return answer


def proposer_of(provider: Scripted, **how) -> tuple[LLMProposer, list[str], list[float]]:
    said: list[str] = []
    slept: list[float] = []
    how = {"say": said.append, "sleep": slept.append} | how
    return LLMProposer(provider, device="cpu", **how), said, slept


def row(number: int, status: str, source: str, strategy: str = "fuse", **more) -> Experiment:
    return Experiment(
        number, "t", "norm", status=status, candidate=source_id(source), strategy=strategy,
        proposer="scripted", **more,
    )  # fmt: skip


def test_one_answer_is_one_proposal() -> None:
    provider = Scripted(reply(ANSWER))
    idea = proposer_of(provider)[0].propose(make_state())
    assert isinstance(idea, Proposal)
    assert (idea.source, idea.strategy, idea.backend, idea.proposer) == (FASTER, "fuse", "torch", "scripted")
    assert (idea.tokens_in, idea.tokens_out, idea.cost_usd, idea.model) == (100, 20, 0.01, "m-1")
    (request,) = provider.asked
    assert "class Model" in request.task and KERNEL.strip() in request.turns[-1]["content"]


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (reply(""), "empty"),
        (reply("I would tile it."), "neither a python block"),
        (reply("```python\n" + KERNEL, finish="length"), "greatest length"),
        (reply(block(KERNEL)), "unchanged"),
    ],
)
def test_an_unusable_answer_gets_one_corrective_round(first: Reply, why: str) -> None:
    provider = Scripted(first, reply(ANSWER))
    idea = proposer_of(provider)[0].propose(make_state())
    assert isinstance(idea, Proposal) and idea.source == FASTER
    assert (idea.tokens_in, idea.tokens_out, idea.cost_usd) == (200, 40, 0.02), "both are paid for"
    again = provider.asked[1]
    assert [t["role"] for t in again.turns] == ["user", "assistant", "user"]
    assert why in again.turns[-1]["content"] and again.task == provider.asked[0].task, "from the cache"


def test_two_unusable_answers_are_a_failure_with_both_reasons() -> None:
    provider = Scripted(reply(""), reply("no"))
    failure = proposer_of(provider)[0].propose(make_state())
    assert isinstance(failure, Failure) and failure.tokens_in == 200
    assert "neither a python block" in failure.reason and "empty" in failure.reason


def test_a_refusal_is_not_argued_with() -> None:
    provider = Scripted(reply("No.", finish="refused"))
    failure = proposer_of(provider)[0].propose(make_state())
    assert isinstance(failure, Failure) and "refused" in failure.reason and len(provider.asked) == 1


def test_a_file_that_had_its_verdict_is_sent_back() -> None:
    other = KERNEL + "# other\n"
    provider = Scripted(reply(ANSWER), reply(block(other)))
    history = [row(2, "discard", FASTER)]
    idea = proposer_of(provider)[0].propose(make_state(tried=frozenset({source_id(FASTER)}), history=history))
    assert isinstance(idea, Proposal) and idea.source == other and idea.strategy == "fuse"
    assert "ended as discard" in provider.asked[1].turns[-1]["content"]


def failing(folder: Path, *statuses: str) -> TaskState:
    """A task on which attempts ended so, the later ones repairs of the first."""
    rows = []
    for number, status in enumerate(statuses):
        source = KERNEL + f"# attempt {number}\n"
        store_source(folder, source)
        rows.append(
            row(number + 2, status, source, "fuse,repair" if number else "fuse", reason="no such name")
        )
    return make_state(folder, history=rows)


def test_a_plan_outlives_its_first_buggy_implementation(tmp_path: Path) -> None:
    provider = Scripted(reply(block(FASTER)))
    idea = proposer_of(provider)[0].propose(failing(tmp_path, "compile_error"))
    assert isinstance(idea, Proposal) and idea.strategy == "fuse,repair"
    asked = provider.asked[0].turns[-1]["content"]
    assert "# attempt 0" in asked and "no such name" in asked


@pytest.mark.parametrize(
    "statuses", [("discard",), ("compile_error", "crash", "incorrect"), ("compile_error", "discard")]
)
def test_a_plan_that_works_or_has_had_its_repairs_is_over(tmp_path: Path, statuses: Sequence[str]) -> None:
    provider = Scripted(reply(ANSWER))
    idea = proposer_of(provider)[0].propose(failing(tmp_path, *statuses))
    assert isinstance(idea, Proposal) and idea.strategy == "fuse"


def test_a_reflection_goes_on_in_the_conversation_and_is_paid_for_in_the_same_row() -> None:
    provider = Scripted(reply(ANSWER), reply("DIAGNOSIS: wrong - 2 %\nAVOID: tiling rows\nTRY: wider loads"))
    proposer, _, _ = proposer_of(provider)
    state = make_state()
    idea = proposer.propose(state)
    assert isinstance(idea, Proposal)
    lesson = proposer.learn(state, idea, row(2, "discard", FASTER, speedup_vs_best_baseline=0.9))
    assert lesson is not None and (lesson.avoid, lesson.next) == ("tiling rows", "wider loads")
    assert (idea.tokens_in, idea.cost_usd) == (200, 0.02)
    first, second = provider.asked
    assert (second.system, second.task) == (first.system, first.task)
    assert second.turns[0] == first.turns[0] and REFLECT in second.turns[-1]["content"]
    assert second.max_output_tokens < first.max_output_tokens


def test_no_reflection_on_a_plan_that_will_be_repaired() -> None:
    provider = Scripted(reply(ANSWER))
    proposer, _, _ = proposer_of(provider)
    state = make_state()
    idea = proposer.propose(state)
    assert isinstance(idea, Proposal)
    assert proposer.learn(state, idea, row(2, "incorrect", FASTER)) is None and len(provider.asked) == 1


# --- a bad night -----------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_trimmed() -> None:
    long = ProviderError("too long", kind="overflow")
    provider = Scripted(long, reply(ANSWER))
    state = make_state(recall="- merge: positive\n" * 40)
    idea = proposer_of(provider)[0].propose(state)
    assert isinstance(idea, Proposal)
    lengths = [len(a.task) + sum(len(t["content"]) for t in a.turns) for a in provider.asked]
    assert lengths[1] <= lengths[0]
    provider = Scripted(*[long] * (MAX_TRIM + 1))
    proposer, said, _ = proposer_of(provider)
    assert isinstance(proposer.propose(state), Failure) and "nothing more can be left out" in said[0]
    assert not proposer.dead and proposer.propose(state) is None, "other tasks may still fit"


@pytest.mark.parametrize("kind", ["quota", "rate", "server", "connection"])
def test_an_api_in_trouble_is_waited_for(kind: str) -> None:
    trouble = ProviderError("busy", kind=kind)  # type: ignore[arg-type]
    provider = Scripted(trouble, trouble, reply(ANSWER))
    proposer, said, slept = proposer_of(provider)
    assert isinstance(proposer.propose(make_state()), Proposal)
    assert sum(slept) == sum(PAUSES_S[:2]) and len(said) == 2


def test_an_api_that_does_not_come_back_is_left_alone() -> None:
    provider = Scripted(*[ProviderError("credit used up", kind="quota")] * (len(PAUSES_S) + 1))
    proposer, said, slept = proposer_of(provider)
    failure = proposer.propose(make_state())
    assert isinstance(failure, Failure) and failure.final and sum(slept) <= MAX_PAUSED_S
    assert "not asked any more" in said[-1] and proposer.propose(make_state()) is None


@pytest.mark.parametrize("kind", ["auth", "model"])
def test_a_wrong_key_is_final_at_once(kind: str) -> None:
    provider = Scripted(ProviderError("no", kind=kind))  # type: ignore[arg-type]
    proposer, _, slept = proposer_of(provider)
    failure = proposer.propose(make_state())
    assert isinstance(failure, Failure) and failure.final and not slept and proposer.dead


def test_a_pause_ends_when_the_run_is_stopped() -> None:
    provider = Scripted(ProviderError("busy", kind="rate"))
    proposer, _, slept = proposer_of(provider, stop=lambda: True)
    assert isinstance(proposer.propose(make_state()), Failure) and not slept


@pytest.mark.parametrize(
    ("spending", "why"),
    [
        (Spending(max_tokens=100, tokens=100), "--max-tokens 100 is spent"),
        (Spending(max_tokens=500), "the next request may take"),
        (Spending(max_usd=1.0, usd=1.5), "--max-usd 1 is spent"),
        (Spending(max_usd=1.0), "no price is known"),
    ],
)
def test_limits_are_kept_before_asking(spending: Spending, why: str) -> None:
    provider = Scripted()
    proposer, said, _ = proposer_of(provider, spending=spending)
    assert proposer.propose(make_state()) is None and not provider.asked
    assert why in proposer.dead and len(said) == 1


def test_what_is_near_its_roofline_is_not_asked_about() -> None:
    proposer, said, _ = proposer_of(provider := Scripted())
    state = make_state(current_latency_us=3.6, baselines={"eager": 9.0})  # the roofline's 3.5
    assert proposer.propose(state) is None and not provider.asked
    assert len(said) == 1 and "is not asked about" in said[0]


# --- what is recorded ------------------------------------------------------------------------------------


def test_a_transcript_replays_itself(tmp_path: Path) -> None:
    record = tmp_path / "llm.jsonl"
    provider = Scripted(reply(""), reply(ANSWER))
    first = proposer_of(provider, record=record)[0].propose(make_state())
    again = LLMProposer(make_provider(f"replay:{record}"), device="cpu").propose(make_state())
    assert isinstance(first, Proposal) and isinstance(again, Proposal)
    assert (again.source, again.strategy, again.tokens_in) == (first.source, first.strategy, 200)
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    assert [e["purpose"] for e in entries] == ["edit", "correct"]
    assert "system" in entries[0]["prompt"] and "system" not in entries[1]["prompt"], "constant parts once"


def test_an_answer_that_a_kill_left_without_a_row_is_not_paid_for_twice(tmp_path: Path) -> None:
    record = tmp_path / "llm.jsonl"
    proposer_of(Scripted(reply(ANSWER)), record=record)[0].propose(make_state())
    spending = Spending(max_tokens=100_000)
    proposer, _, _ = proposer_of(provider := Scripted(), record=record, spending=spending)
    idea = proposer.propose(make_state())
    assert isinstance(idea, Proposal) and idea.source == FASTER and not provider.asked
    assert spending.tokens == 120


def test_no_key_is_in_a_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    echo = ProviderError("bad key sk-very-secret-0123456789", kind="auth")
    record = tmp_path / "llm.jsonl"
    proposer_of(Scripted(echo), record=record)[0].propose(make_state())
    assert "very-secret" not in record.read_text() and "bad key" in record.read_text()


def test_answers_of_a_recording_go_to_the_prompts_they_match(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    entries = [{"text": "one", "match": "Family attention"}, {"text": "two", "match": "a norm"}]
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    provider = make_provider(f"replay:{path}")
    request = Request("rules", "about a norm", [{"role": "user", "content": "go"}], 100)
    found = provider.complete(request)
    assert found is not None and found.text == "two" and provider.complete(request) is None


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"finish": "stop"}', '{"text": "x", "finish": "no"}'])
def test_a_bad_recording_is_a_usage_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "r.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1"):
        make_provider(f"replay:{tmp_path / 'r.jsonl'}")


@pytest.mark.parametrize(
    ("text", "what"),
    [("nobody:x", "no provider 'nobody'"), ("openai", "openai:MODEL"), ("replay:", "FILE.jsonl"),
     ("replay:/no/such", "can't read")],
)  # fmt: skip
def test_bad_llm_flags(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        make_provider(text)


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_every_provider_says_what_it_lacks(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        PROVIDERS[name].create("some-model", None)
    assert "\n" not in str(caught.value)
